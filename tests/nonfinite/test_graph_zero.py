"""Values at which functions or their slopes are infinite: told if, and only if."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.nn import functional

from halfstep.nonfinite.graph import find_in_graph

if TYPE_CHECKING:
    from collections.abc import Callable


LEAF = [0.0, 0.25, 4.0]


@pytest.mark.parametrize(
    ("operation", "where", "evidence"),
    [
        (torch.log, "log", "its argument is 0 at 1 of 3 places"),
        (torch.log2, "log2", "its argument is 0 at 1 of 3 places"),
        (lambda x: (x - 1).log(), "log", "its argument is negative at 2 of 3 places"),
        (lambda x: (x - 1).log1p(), "log1p", "its argument is -1 at 1 of 3 places"),
        (torch.sqrt, "sqrt", "its argument is 0 at 1 of 3 places"),
        (lambda x: (x - 1).sqrt(), "sqrt", "its argument is negative at 2 of 3 places"),
        (torch.rsqrt, "rsqrt", "its argument is 0 at 1 of 3 places"),
        (torch.reciprocal, "reciprocal", "its argument is 0 at 1 of 3 places"),
        (lambda x: x.exp() / x, "div", "its divisor is 0 at 1 of 3 places"),
        (lambda x: x.exp() / 0, "div", "its divisor is 0"),
        (
            lambda x: x**-0.5,
            "pow",
            "it raises 0 to a power below 0 at 1 of 3 places",
        ),
        (lambda x: x**0.5, "pow", "its argument is 0 at 1 of 3 places"),
        (
            lambda x: x ** torch.tensor([0.5, 2.0, -1.0]),
            "pow",
            "its argument is 0 at 1 of 3 places",
        ),
        (
            lambda x: (x / 4).acos(),
            "acos",
            "its argument is not inside -1 to 1 at 1 of 3 places",
        ),
        (lambda x: x[x > 9].mean(), "mean", "it is the mean of nothing"),
        (
            lambda x: x.masked_fill(x >= 0, -math.inf).logsumexp(0),
            "logsumexp",
            "all it sums is -inf",
        ),
        (lambda x: torch.hypot(x, x), "hypot", "its argument is 0 at 1 of 3 places"),
    ],
)
def test_a_singular_value_is_found_and_counted(
    operation: Callable[[Tensor], Tensor], where: str, evidence: str
) -> None:
    """Law: a value where a function or its slope is infinite or undefined is told."""
    leaf = nn.Parameter(torch.tensor(LEAF))
    finding = required(find_in_graph(operation(leaf).sum(), lambda _: "leaf"))
    assert finding.cause == "zero"
    assert re.fullmatch(rf"{where}( \(leaf\)|, after \w+ \(leaf\))", finding.where)
    assert finding.evidence == evidence


def test_complex_numbers_have_no_order() -> None:
    """Law: a complex argument is 0 or not, and never negative or beyond a bound."""
    leaf = nn.Parameter(torch.tensor([complex(-1, 0), complex(2, 1)]))
    assert find_in_graph(leaf.log().abs().sum(), lambda _: "leaf") is None
    finding = required(find_in_graph((leaf * 0).log().abs().sum(), lambda _: "leaf"))
    assert finding.evidence == "its argument is 0 at 2 of 2 places"
    finding = required(
        find_in_graph((leaf.acos() * math.inf).abs().sum(), lambda _: "leaf")
    )
    assert "not inside" not in finding.evidence


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "acos": torch.acos,
    "asin": torch.asin,
    "atanh": torch.atanh,
    "erfinv": torch.erfinv,
    "exp": lambda x: (x * 100).exp(),
    "hypot": lambda x: torch.hypot(x, x * 2),
    "power": lambda x: x.abs() ** 0.5,
    "pole": lambda x: x**-2.0,
    "square": lambda x: x**2.0,
    "flat": lambda x: x**0.0,
    "quotient": lambda x: 1 / (x * x),
    "norm": lambda x: x.reshape(-1, 1).norm(dim=1),
    "direction": lambda x: functional.normalize(x.reshape(-1, 1)).reshape(-1),
    "deviation": lambda x: torch.stack((x, x)).std(0),
    "angle": lambda x: torch.atan2(x, x * 0),
    "product": lambda x: torch.stack((x, x)).prod(0),
    "softmax": lambda x: x.softmax(0),
}


VALUES = [-1.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("numbers", [*([value] for value in VALUES), VALUES])
def test_a_finding_means_that_a_pass_is_spoilt(
    name: str, numbers: list[float], *, guarded: bool
) -> None:
    """Law: there is a finding if, and only if, loss or gradient are not finite.

    Also where torch.where hides from the loss what an operation made.
    """
    leaf = nn.Parameter(torch.tensor(numbers))
    result = EXACT[name](leaf)
    loss = torch.where(result.isfinite(), result, 0).sum() if guarded else result.sum()
    finding = find_in_graph(loss, lambda _: "leaf")
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    healthy = bool(loss.isfinite() and leaf.grad.isfinite().all())
    assert (finding is None) == healthy, (finding, leaf.grad)

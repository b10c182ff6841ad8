"""Values at which operations, or their slopes, are infinite or undefined.

In: what an operation saved for its backward pass, by name. Out: the places where it
meets such a value, and what to change.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def local_data(value: Tensor) -> Tensor:
    """Return the numbers that lie here, without asking another process."""
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    if local.layout == torch.sparse_coo:
        return local._values()  # noqa: SLF001
    return local if local.layout == torch.strided else local.values()


@dataclass(frozen=True)
class DomainCheck:
    """At which values operations, or their slopes, are infinite or undefined."""

    node_kinds: str
    saved_names: str
    test: Callable[..., Tensor]
    affects: str
    evidence: str
    advice: str
    nonfinite_kind: str = ""
    """"inf" or "NaN" on the way forward; "" where either may be, or neither is."""
    cause: str = "zero"

    def mask(self, saved: dict[str, Any]) -> Tensor:
        """Say where such values lie; nothing, if they were not saved."""
        values = [saved.get(name) for name in self.saved_names.split()]
        tensors = [local_data(torch.as_tensor(v)) for v in values if v is not None]
        is_complete = len(tensors) == len(values) and not any(
            map(torch.is_complex, tensors)
        )
        return self.test(*tensors) if is_complete else torch.zeros(0)


_AT_0, _BELOW_0 = "its argument is 0", "its argument is negative"
_AT_1, _NONE = "its argument is not inside -1 to 1", "it is the mean of nothing"
_LOG = "Add a small number inside log(), or use a loss that works on logits."
_ROOT = "Add a small number to its argument: its slope at 0 is infinite."
_DIV = "Add a small number to the divisor, or clamp it away from 0."
_ANGLE = "Add a small number to one of its arguments: at 0, 0 its slope is NaN."
_CLAMP = "Clamp its argument to the inside of its domain."
_SKIP = "Skip such a batch, or divide a sum by max(count, 1)."
MASK = "Leave something in each row unmasked, and mask no class that a target names."
FIND = "Find the batch, buffer or frozen weight that brings it in: print them."
EPSILON = (
    "If Adam or its like updates it in float16 itself (level O3): an eps of 1e-08 is 0 "
    "there, and 0 / 0 is NaN; use eps=6.1e-05, or master weights (level O2)."
)
"""For a parameter in float16 that is not finite."""
_EXP = "Subtract the maximum first, or use a function that takes logits."


@functools.cache
def _has_slope(function: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Say whether torch gives a function of two tensors a finite slope at 0."""
    with torch.enable_grad():
        zero = torch.zeros((), device="cpu", requires_grad=True)
        (slope,) = torch.autograd.grad(function(zero, zero), zero)
    return bool(slope.isfinite())


def _both_0(first: Tensor, second: Tensor) -> Tensor:
    return (first == 0) & (second == 0) & (not _has_slope(torch.atan2))


# Norms, std, prod and cdist are not here: torch gives them a finite slope at 0.
DOMAIN_CHECKS = (
    DomainCheck("Log Log2 Log10", "self", lambda x: x == 0, "both", _AT_0, _LOG, "inf"),
    DomainCheck(
        "Log Log2 Log10", "self", lambda x: x < 0, "forward", _BELOW_0, _CLAMP, "NaN"
    ),
    DomainCheck(
        "Log1P", "self", lambda x: x == -1, "both", "its argument is -1", _LOG, "inf"
    ),
    DomainCheck(
        "Logsumexp",
        "result",
        torch.isneginf,
        "both",
        "all it sums is -inf",
        MASK,
        "inf",
    ),
    DomainCheck("Sqrt Hypot", "result", lambda x: x == 0, "backward", _AT_0, _ROOT),
    DomainCheck("Sqrt Rsqrt", "result", torch.isnan, "both", _BELOW_0, _CLAMP, "NaN"),
    DomainCheck("Rsqrt Reciprocal", "result", torch.isinf, "both", _AT_0, _DIV, "inf"),
    DomainCheck(
        "Pow",
        "self exponent",
        lambda x, n: (x == 0) & (n < 0),
        "both",
        _AT_0,
        _DIV,
        "inf",
    ),
    DomainCheck(
        *("Pow", "self exponent", lambda x, n: (x == 0) & (n > 0) & (n < 1)),
        *("backward", _AT_0, _ROOT),
    ),
    DomainCheck(
        "Atan2", "self other", _both_0, "backward", "both arguments are 0", _ANGLE
    ),
    DomainCheck("Div", "other", lambda x: x == 0, "both", "its divisor is 0", _DIV),
    DomainCheck(
        "Acos Asin Erfinv", "self", lambda x: x.abs() >= 1, "both", _AT_1, _CLAMP
    ),
    DomainCheck("Atanh", "self", lambda x: x.abs() == 1, "both", _AT_1, _CLAMP, "inf"),
    DomainCheck(
        "Exp Expm1", "result", torch.isposinf, "both", "it is inf", _EXP, "inf", "range"
    ),
    DomainCheck(
        "Mean", "self_sym_numel", lambda n: n == 0, "forward", _NONE, _SKIP, "NaN"
    ),
    DomainCheck(
        "NllLoss NllLoss2D",
        "total_weight",
        torch.logical_not,
        "forward",
        _NONE,
        _SKIP,
        "NaN",
    ),
)

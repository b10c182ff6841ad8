"""Planted causes of inf and NaN: each is found, where it is, with its numbers."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, planted
from processes import group_of_one
from required import required
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.nonfinite.domains import find_domain_error
from halfstep.nonfinite.graph import find_in_graph
from halfstep.nonfinite.origin import BadOp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = math.inf

TARGETS = torch.tensor([0, 1, 2, 0])
SEEN = {"forward range", "zero", "weight"}
"""Causes that a graph shows, if nothing in it is recomputed."""
RECOMPUTED = {"plain", "reentrant"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, 3))


def look(
    dtype: torch.dtype, model: nn.Module, loss_of: Callable[[], Tensor]
) -> BadOp | None:
    """Return what is found in a loss, all under autocast."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.autocast("cpu", FP16 if dtype == FP32 else dtype, dtype != FP32):
        return find_in_graph(loss_of(), lambda parameter: names[id(parameter)])


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), TARGETS)


def test_planted_faults() -> None:
    """Law: 95 % of the faults that a graph shows have their cause, weights their place.

    The others are a norm's root of zero, and a statistic that counts as data.
    """
    wrong = {}
    with group_of_one():
        for name, fault in FAULTS.items():
            if fault.cause not in SEEN or fault.run.get("mode") in RECOMPUTED:
                continue
            run = planted(name)
            names = {id(param): key for key, param in run.model.named_parameters()}
            loss = run.step(run.wrapped())
            bad = find_in_graph(loss, lambda param, names=names: names[id(param)])
            is_placed = fault.cause != "weight" or fault.judge(bad)[0]
            if bad is None or bad.cause != fault.cause or not is_placed:
                wrong[name] = str(bad)
    assert len(wrong) <= 3, wrong


@pytest.mark.parametrize("low", [FP16, BF16, FP32])
def test_an_eps_before_a_cast(low: torch.dtype) -> None:
    """Law: numbers in fp32 that are float16's were computed there."""
    values = {"self": torch.tensor([0.0, 0.1]).to(low).float()}
    error = required(find_domain_error("log", values, "forward"))
    assert ("a smaller eps is 0" in error.evidence) == (low == FP16)


FULL = torch.full((4, 8), 256.0)
"""Times a weight of 32, over 8 columns: 8 * 256 * 32 = 65536, float16 holds 65504."""


@pytest.mark.parametrize(
    ("dtype", "overflows"), [(FP16, True), (BF16, False), (FP32, False)]
)
@pytest.mark.parametrize("weight", [32.0, 31.0])
def test_range_is_blamed_to_the_number(
    dtype: torch.dtype, weight: float, *, overflows: bool
) -> None:
    """Law: a product above 65504 is blamed in float16 alone, with what it reaches."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.get_parameter("0.weight").copy_(torch.eye(8))
        model.get_parameter("2.weight")[1].fill_(weight)
    finding = look(dtype, model, lambda: loss_of(model, FULL))
    if not overflows or weight < 32:
        assert finding is None
        return
    assert str(required(finding)) == (
        "2 (linear) produced inf: its result reaches 6.6e+04, float16 holds 65504. "
        "Keep it in float32: policy='torch + module:2=fp32'; or train in bf16."
    )
    assert (finding.cause, finding.rule) == ("forward range", "module:2=fp32")


@pytest.mark.parametrize(
    ("make", "name", "size", "words"),
    [
        (mlp, "0.weight", 3e4, "0 (linear): its result holds inf, its inputs reach"),
        (cnn, "0.weight", 3e4, "0 (conv2d): its result reaches 2.7e+05, float16 hol"),
        (mlp, "0.weight", 1e5, "0 (cast): its argument reaches 1.0e+05, float16 hol"),
    ],
)
def test_range_is_found_in_first_layers_and_casts(
    make: Callable[[], nn.Module], name: str, size: float, words: str
) -> None:
    """Law: what overflows is named though nobody saved its weight, or it is a copy.

    Where the product is not known, what takes it in float16 is told, and its rule.
    """
    model, shape = make(), (4, 8) if make is mlp else (4, 1, 4, 4)
    with torch.no_grad():
        model.get_parameter(name).fill_(size)
    finding = required(look(FP16, model, lambda: loss_of(model, torch.ones(shape))))
    assert finding.cause == "forward range"
    assert f"{finding.place}: {finding.evidence}".startswith(words)
    taken = "linear (2.weight, 2.bias) takes it in float16"
    unknown = "inputs" in words
    assert finding.evidence.endswith(taken) == unknown
    rule = "module:0=fp32 + module:2=fp32" if unknown else "module:0=fp32"
    assert finding.rule == rule
    assert f"policy='torch + {rule}'" in finding.advice


def test_data_too_large_for_float16_is_told_apart() -> None:
    """Law: finite fp32 data that a cast makes inf is data, and the cast is named."""
    model, x = mlp(), torch.ones(4, 8)
    x[2, 3] = 7e4
    finding = required(look(FP16, model, lambda: loss_of(model, x)))
    assert finding.cause == "data"
    assert finding.evidence == (
        "the input of linear (0.weight, 0.bias): it holds inf at 1 of 32 places, "
        "where a cast to float16 makes it of all above 65504"
    )
    assert look(BF16, model, lambda: loss_of(model, x)) is None


def test_a_gradient_that_a_scale_made_too_large() -> None:
    """Law: an inf at each place, as of scaled ones, is no batch to be scaled down."""
    model, x = mlp(), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", FP16):
        scaled = model(x).float().sum() * 2.0**17
    (slope,) = torch.autograd.grad(scaled, x, create_graph=True)
    finding = required(find_in_graph(slope.square().mean(), str))
    assert "If it is the gradient of a scaled loss" in finding.advice


def filled(size: int, weight: float, bias: float = 0.0) -> nn.Linear:
    model = nn.Linear(8, size)
    nn.init.constant_(model.weight, weight)
    nn.init.constant_(model.bias, bias)
    return model


WIDE = torch.ones(2, 2, 8)
PRODUCTS: dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor], str]] = {
    "the product, not cast and softmax behind it": (
        *(filled(3, 3e4), lambda m: loss_of(m, torch.ones(4, 8))),
        "model (linear): ",
    ),
    "not the view behind a product whose value is known": (
        *(filled(8, 3e4), lambda m: m(WIDE).square().float().sum()),
        "model (linear): ",
    ),
    "both of two that no value tells apart, not what only views": (
        *(filled(8, 1.0), lambda m: (m(FULL).view(-1) * 1e4).relu().sum().float()),
        "model: linear (weight, bias) to mul: ",
    ),
    # 8 * 256 * 20 and 40960 fit, their sum does not.
    "a layer with its bias": (
        *(filled(3, 20.0, 40960.0), lambda m: loss_of(m, FULL)),
        "model (linear): ",
    ),
}


@pytest.mark.parametrize("what", PRODUCTS)
def test_what_left_the_range_is_named(what: str) -> None:
    """Law: that of the name."""
    model, run, words = PRODUCTS[what]
    finding = required(look(FP16, model, lambda: run(model)))
    assert finding.cause == "forward range"
    assert f"{finding.place}: {finding.evidence}".startswith(words)
    if " to " in words:
        assert "policy='torch + op:linear=fp32 + op:mul=fp32'" in finding.advice


@pytest.mark.filterwarnings("ignore:level O1 with dtype fp16")
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(
    ("weight", "cause", "where"),
    [(1e5, "forward range", "model (cast)"), (math.nan, "weight", "model")],
)
def test_our_casts_and_torchs_are_one(
    weight: float, cause: str, where: str, *, ours: bool
) -> None:
    """Law: a weight is named, and its cast, whoever made the copy."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters())
    session = hs.prepare(model, optimizer, "O1", dtype="fp16") if ours else None
    with torch.no_grad():
        model.weight.fill_(weight)
    with session.autocast() if session else torch.autocast("cpu", FP16):
        loss = loss_of(model, torch.ones(4, 8))
    finding = required(
        find_in_graph(loss, lambda w: "weight" if w.ndim > 1 else "bias")
    )
    assert (finding.cause, finding.place) == (cause, where)


def test_a_dispatch_mode_changes_nothing() -> None:
    """Law: a graph with a product by a number is read under a dispatch mode too.

    The product before it is computed again, fits, and is not named.
    """

    class Transparent(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    model = mlp()
    with Transparent():
        finding = look(FP16, model, lambda: (model(FULL) * 1e5).relu().sum().float())
    finding = required(finding)
    where = "mul, after linear (2.weight, 2.bias)"
    reached = "its inputs reach 1.0e+05, float16 holds 65504"
    assert finding.evidence == f"{where}: its result holds inf, {reached}"


ONES, BAD = torch.ones(3), torch.tensor([0.0, math.nan, 0.0])
SPOILT: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], str, str]] = {
    "frozen": (
        *(ONES, lambda leaf: leaf * nn.Parameter(BAD, requires_grad=False)),
        *("weight", "frozen: it holds NaN at 1 of 3 places"),
    ),
    "complex": (
        torch.tensor([complex(1, 2), complex(1, math.nan)]),
        lambda leaf: (leaf * leaf).abs(),
        *("weight", "leaf: it holds NaN at 1 of 2 places"),
    ),
    "sparse": (
        torch.ones(3, 2),
        lambda leaf: torch.sparse.mm(torch.stack([ONES, BAD]).to_sparse(), leaf),
        *("data", ": it holds NaN at 1 of 4 places"),
    ),
    "target": (
        *(ONES, lambda leaf: functional.mse_loss(leaf, BAD)),
        *("data", "the target of mse_loss (leaf): it holds NaN at 1 of 3 places"),
    ),
    **{
        f"{kind} added in {dtype}": (
            ONES.to(dtype),
            lambda leaf, bad=bad: (leaf + BAD.nan_to_num(bad).to(leaf.dtype)).relu(),
            *("data", f"{kind} comes in, yet its inputs reach 1.0e+00"),
        )
        for kind, bad in (("NaN", math.nan), ("inf", math.inf))
        for dtype in (FP32, BF16)
    },
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_came_in_spoilt_is_told(kind: str) -> None:
    """Law: NaN or inf in what a program computes with is counted, in its role."""
    values, run, cause, words = SPOILT[kind]
    leaf = nn.Parameter(values)
    finding = required(
        find_in_graph(
            run(leaf).sum(), lambda given: "leaf" if given is leaf else "frozen"
        )
    )
    assert finding.cause == cause
    assert finding.evidence.endswith(words)
    assert finding.place == ("model (add)" if "added" in kind else finding.place)


def test_healthy_sparse_data_is_none() -> None:
    """Law: no number of a sparse matrix is taken for NaN."""
    leaf = nn.Parameter(torch.ones(3, 2))
    loss = torch.sparse.mm(torch.eye(3).to_sparse(), leaf).sum()
    assert find_in_graph(loss, lambda _: "leaf") is None


# Values at which functions or their slopes are infinite: told if, and only if.


LEAF = [0.0, 0.25, 4.0]
POWERS = torch.tensor([0.5, 2.0, -1.0])


@pytest.mark.parametrize(
    ("operation", "where", "evidence"),
    [
        (lambda x: (x - 1).log(), "log", "its argument is negative at 2 of 3 places"),
        (lambda x: (x - 1).log1p(), "log1p", "its argument is -1 at 1 of 3 places"),
        (torch.rsqrt, "rsqrt", "its argument is 0 at 1 of 3 places"),
        (lambda x: x.exp() / x, "div", "its divisor is 0 at 1 of 3 places"),
        (lambda x: x**-0.5, "pow", "it raises 0 to a power below 0 at 1 of 3 places"),
        (lambda x: x**POWERS, "pow", "its argument is 0 at 1 of 3 places"),
        (lambda x: (x / 4).acos(), "acos", "its argument is not inside -1 to 1 at 1"),
        (lambda x: x[x > 9].mean(), "mean", "it is the mean of nothing"),
        (lambda x: x.masked_fill(x >= 0, -INF).logsumexp(0), "logsumexp", "all it"),
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
    alone, after = rf"model \({where}\)", rf"model: {where}, after \w+ \(leaf\)"
    said = f"{finding.place}: {finding.evidence}"
    assert re.match(rf"({alone}|{after}): {re.escape(evidence)}", said)


def test_complex_numbers_have_no_order() -> None:
    """Law: a complex argument is 0 or not, and never negative or beyond a bound."""
    leaf = nn.Parameter(torch.tensor([complex(-1, 0), complex(2, 1)]))
    assert find_in_graph(leaf.log().abs().sum(), lambda _: "leaf") is None
    finding = required(find_in_graph((leaf * 0).log().abs().sum(), lambda _: "leaf"))
    assert finding.evidence.endswith(": its argument is 0 at 2 of 2 places")
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
    "between": lambda x: x.abs() ** 1.5,
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


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("numbers", [*([value] for value in VALUES), VALUES])
def test_a_finding_means_that_a_pass_is_spoilt(name: str, numbers: list[float]) -> None:
    """Law: there is a finding if, and only if, loss or gradient are not finite.

    Also where torch.where hides from the loss what an operation made.
    """
    for guarded in (False, True):
        check_exact(name, numbers, guarded=guarded)


def check_exact(name: str, numbers: list[float], *, guarded: bool) -> None:
    leaf = nn.Parameter(torch.tensor(numbers))
    result = EXACT[name](leaf)
    loss = torch.where(result.isfinite(), result, 0).sum() if guarded else result.sum()
    finding = find_in_graph(loss, lambda _: "leaf")
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    healthy = bool(loss.isfinite() and leaf.grad.isfinite().all())
    assert (finding is None) == healthy, (finding, leaf.grad)

"""`find_nonfinite`: what a loss is, what a program calls and casts, and the rule."""

import math
from collections.abc import Callable

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.casting import convert_model
from halfstep.nonfinite.origin import BadOp

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.ones(4, 8)


# What is a loss function, by where it stands


def beyond(x: Tensor) -> Tensor:
    """Return what float16 does not hold, computed there whatever comes in."""
    return (x.half() * 0 + 300) * 300


class PathLoss(nn.Module):
    """What radio waves lose on their way: a layer like another."""

    def forward(self, x: Tensor) -> Tensor:
        return beyond(x)


class Level(nn.Module):
    """One number for a whole batch, which layers then use."""

    def forward(self, x: Tensor) -> Tensor:
        return beyond(x).mean()


class Objective(nn.Module):
    """A loss that is not called so, with a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = PathLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum()


class BalanceLoss(Level):
    """A loss on the way, as experts have it."""


class Squares(nn.MSELoss):
    """One of torch's losses, without a mean."""

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:  # noqa: A002
        del target
        return beyond(input)


class TrainingLoss(nn.Module):
    """A model: a layer, then what is asked about, then perhaps a layer.

    Without a `middle` it makes a loss in each pass, as models with labels do.
    """

    def __init__(self, middle: type[nn.Module] | None, *, last: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.middle = None if middle is None else middle()
        self.outer = nn.Linear(8, 1) if last else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        made: Tensor = (self.middle or BalanceLoss())(hidden)
        return made if self.outer is None else self.outer(hidden * made)


def found(model: nn.Module, x: Tensor = X) -> BadOp:
    return required(hs.find_nonfinite(model, lambda: loss(model, x, FP16)))


def loss(model: nn.Module, x: Tensor, dtype: torch.dtype, rule: str = "") -> Tensor:
    policy = "torch" + f" + {rule}" * bool(rule)
    with hs.autocast("cpu", dtype, policy=policy, model=model):
        out: Tensor = model(x)
        return out.float().mean()


@pytest.mark.parametrize(
    ("middle", "last", "module", "cause"),
    [
        (PathLoss, True, "middle", "forward range"),
        (PathLoss, False, "middle", "forward range"),
        (Level, True, "middle", "forward range"),
        (Level, False, "middle", "loss function"),
        (Objective, False, "middle.first", "loss function"),
        (BalanceLoss, True, "middle", "loss function"),
        (Squares, False, "middle", "loss function"),
        (None, False, "model", "loss function"),
    ],
)
def test_a_loss_is_known_by_where_it_stands(
    middle: type[nn.Module] | None, module: str, cause: str, *, last: bool
) -> None:
    """Law: what gives one number, on which no weights work, is one; a layer is none.

    The name of the model says nothing.
    """
    bad = found(TrainingLoss(middle, last=last))
    assert (bad.module, bad.cause) == (module, cause), str(bad)
    # It is cast by hand there, which no rule undoes.
    assert not bad.rule
    assert ("The code itself casts" in bad.advice) == (cause == "forward range")


def test_checkpoints_change_no_verdict() -> None:
    """Law: weights that run once more in the backward pass do not work on the loss."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.end = Level()

        def forward(self, x: Tensor) -> Tensor:
            return self.end(checkpoint(self.inner, x, use_reentrant=False))

    bad = found(Recomputed())
    assert (bad.module, bad.cause) == ("end", "loss function")


def probability(out: Tensor) -> Tensor:
    return functional.binary_cross_entropy(out.sigmoid(), torch.full_like(out, 2.0))


def refused(out: Tensor) -> Tensor:
    """Return a loss that raises for NaN, which a logarithm made."""
    odd = torch.log(out * 0 - 1)
    return functional.binary_cross_entropy(torch.sigmoid(odd), out * 0)


def weighted(out: Tensor) -> Tensor:
    """Return a loss with class weights that are not finite."""
    weight = torch.tensor([1.0, math.inf, 1.0])
    return functional.cross_entropy(out, torch.tensor([0, 1, 2, 0]), weight=weight)


@pytest.mark.parametrize(
    ("loss_of", "op", "cause", "evidence"),
    [
        (probability, "binary_cross_entropy", "label", "12 of 12 targets are not"),
        (refused, "log", "zero", "its argument is negative"),
        (weighted, "nll_loss", "loss function", "weights hold inf at 1 of 3 places"),
    ],
)
def test_what_a_loss_cannot_use(
    loss_of: Callable[[Tensor], Tensor], op: str, cause: str, evidence: str
) -> None:
    """Law: targets and weights are reported as such, also if torch raises for them."""
    model = nn.Linear(8, 3)
    bad = required(hs.find_nonfinite(model, lambda: loss_of(model(X))))
    assert (bad.module, bad.op, bad.cause) == ("loss", op, cause), str(bad)
    assert evidence in bad.evidence


# What the program calls, and the rule for it


class Root(nn.Module):
    """A weight of the model's own, which no rule on modules speaks of."""

    def __init__(self, shape: tuple[int, ...], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 200.0))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """Return eight products of 100 and 200 a place: 1.6e5, beyond float16."""
        return self.call(x, self.weight)


SQUARE, ROWS = (8, 8), torch.full((4, 8), 100.0)
IMAGE = torch.full((1, 8, 2, 2), 100.0)


def attend(x: Tensor, weight: Tensor) -> Tensor:
    """Call with an operand that autocast's cast makes too large."""
    value = x * weight[:4] * 1e4
    return functional.scaled_dot_product_attention(x, x, value)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Tensor]] = {
    "matmul": (lambda x, w: x @ w, SQUARE, ROWS),
    "mm": (torch.mm, SQUARE, ROWS),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), SQUARE, ROWS),
    "einsum": (lambda x, w: torch.einsum("ij,jk->ik", x, w), SQUARE, ROWS),
    "linalg_multi_dot": (lambda x, w: torch.linalg.multi_dot([x, w, w]), SQUARE, ROWS),
    "conv_transpose2d": (functional.conv_transpose2d, (8, 8, 1, 1), IMAGE),
    "scaled_dot_product_attention": (attend, SQUARE, ROWS),
}


@pytest.mark.parametrize("called", CALLS)
def test_the_rule_matches_what_was_called(called: str) -> None:
    """Law: a product is named as the program calls it, and that rule ends it."""
    call, shape, x = CALLS[called]
    model = Root(shape, call)
    bad = found(model, x)
    assert (bad.module, bad.op, bad.rule) == ("model", called, f"op:{called}=fp32")
    assert not loss(model, x, FP16).isfinite()
    assert loss(model, x, FP16, bad.rule).isfinite()


# What the program casts itself


class Inner(nn.Module):
    """A module whose code casts what it computed."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        return self.cast(self.before(x))


def net(cast: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Inner(cast), nn.Linear(8, 2))


CAST: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "what it casts": (lambda y: (y.float() * 0 + 1e5).half() / 1e5, "to"),
    "what it computes then": (lambda y: (y * 0 + 300).to(FP16).square() / 1e5, "pow"),
    "of two casts": (
        lambda y: (y * 0 + 300).half() * (y * 0 + 300).type(FP16) / 1e5,
        "mul",
    ),
}


@pytest.mark.parametrize("what", CAST)
def test_a_cast_in_the_code_is_named(what: str) -> None:
    """Law: no rule and no format helps there; the advice is to leave the cast out."""
    change, op = CAST[what]
    model = net(change)
    bad = found(model)
    assert (bad.module, bad.op, bad.rule) == ("1", op, "")
    assert bad.cause == "forward range"
    assert "test_replay_losses.py:" in bad.advice
    assert "nor does bfloat16" in bad.advice
    assert not loss(model, X, FP16, "module:1=fp32").isfinite()
    assert not loss(model, X, BF16).isfinite()


def test_a_cast_before_a_product() -> None:
    """Law: autocast casts what a product takes, so there bfloat16 is advised."""
    model = net(lambda y: (y * 0 + 300).half() @ (y * 0 + 300).half().t() @ y)
    bad = found(model)
    assert (bad.op, bad.rule) == ("matmul", "")
    assert "or train in bfloat16" in bad.advice
    assert loss(model, X, BF16).isfinite()


def filled(y: Tensor) -> Tensor:
    buffer = torch.zeros(y.shape, dtype=FP16)
    buffer[:] = y.float() * 0 + 1e5
    return buffer


def test_a_cast_whose_format_may_follow() -> None:
    """Law: where the format may follow another, rule and line are both named."""
    bad = found(net(filled))
    assert bad.rule == "module:1=fp32"
    assert "the code casts at test_replay_losses.py:" in bad.advice
    bad = found(net(lambda y: (y.float() * 0 + 1e5).to(y.dtype)))
    assert bad.rule == "module:1=fp32"


def test_a_cast_outside_of_the_module() -> None:
    """Law: what comes into a module is cast by the rule, so the rule is advised."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1))
    nn.init.constant_(model[1].weight, 200.0)
    forward = model[0].forward
    model[0].forward = lambda x: (forward(x) * 0 + 100).half()
    bad = found(model)
    assert (bad.module, bad.rule) == ("1", "module:1=fp32")
    assert loss(model, X, FP16, bad.rule).isfinite()


def test_an_argument_that_the_code_casts() -> None:
    """Law: of data that the model itself casts, no format is said to hold it."""
    model = Root((8,), lambda x, w: x.half() + w)
    x = torch.full((4, 8), 1e5)
    bad = required(hs.find_nonfinite(model, lambda: model(x).mean()))
    assert bad.cause == "data"
    assert bad.advice.startswith("Normalise the data, or leave out the cast at test_")


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_became_inf_in_a_conversion() -> None:
    """Law: the rule that is advised keeps such a weight; NaN is the checkpoint's."""

    def converted(value: float, rule: str = "") -> BadOp:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Softmax(-1))
        with torch.no_grad():
            model[1].weight[0, 0] = value
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = "lean" + f" + {rule}" * bool(rule)
        # Without it such a weight is rejected at once.
        with convert_model.allow_overflow():
            session = hs.prepare(model, optimizer, "O2", dtype="fp16", policy=policy)

        def step() -> Tensor:
            with session.autocast():
                out: Tensor = session.model(X)
                return out.float().square().mean()

        return hs.find_nonfinite(session.model, step)

    bad = converted(1e5)
    assert (bad.cause, bad.rule) == ("weight", "module:1=fp32")
    assert "cast to float16 makes that" in bad.advice
    assert not converted(1e5, bad.rule)
    bad = converted(math.nan)
    assert (bad.cause, bad.rule) == ("weight", "")
    assert bad.advice.startswith("Go back to the last good checkpoint")

"""First bad operation in odd places; and what it advises ends the fault.

Each fault is a function in the middle of a small model, beside what it becomes when
the advice is followed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from required import required
from small_training import one_thread
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.nonfinite.origin import BadOp

    Change = Callable[[Tensor], Tensor]

X = torch.linspace(-1, 1, 32).sin().view(4, 8)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A small model gains nothing from a second thread."""
    with one_thread():
        yield


class Mid(nn.Module):
    """A function, as a module."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.change(x)


class Net(nn.Module):
    """A layer, a function, a layer."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.mid = Mid(change)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number a row."""
        return self.outer(self.mid(self.inner(x)))  # type: ignore[no-any-return]


def found(
    model: nn.Module, x: Any = X, dtype: torch.dtype | None = None, rule: str = ""
) -> BadOp | None:
    """Return what is said of a model in fp32, or in a region of another format."""

    def step() -> Tensor:
        if dtype is None:
            return model(x).float().square().mean()  # type: ignore[no-any-return]
        policy = f"torch + {rule}" if rule else None
        with hs.autocast("cpu", dtype, policy=policy, model=model if rule else None):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    return hs.find_nonfinite(model, step)


class Reciprocal(torch.autograd.Function):
    """A slope of one's own, which divides by zero; or by a small number beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        """Change nothing."""
        ctx.save_for_backward(x)
        ctx.eps = eps
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Divide by nothing."""
        (x,) = ctx.saved_tensors
        return grads[0] / (x - x + ctx.eps), None


def assigned(number: float) -> Change:
    """Return what writes a number into a column."""

    def change(x: Tensor) -> Tensor:
        y = x * 1
        y[:, 0] = number
        return y

    return change


FIRST = torch.tensor([[True]] + [[False]] * 3)
CORNER = torch.eye(4, 8, dtype=torch.bool)


def masked(x: Tensor, places: Tensor = FIRST, fill: float = -math.inf) -> Tensor:
    """Mask some places."""
    return x.masked_fill(places, fill)


def whitened(x: Tensor, ridge: float) -> Tensor:
    """Take the logarithm of the determinant of a matrix of zeros."""
    return x + torch.linalg.slogdet((x.mT @ x) * 0 + ridge * torch.eye(8))[1]


def in_place(x: Tensor, eps: float) -> Tensor:
    """Divide in place."""
    y = x * 1
    return y.div_((y - y).detach() + eps)


def grouped(x: Tensor, least: float) -> Tensor:
    """Take means of groups, one of which is empty."""
    where = torch.tensor([0, 0, 2, 2])
    total = torch.zeros(3, 8).index_add(0, where, x)
    count = torch.zeros(3).index_add(0, where, torch.ones(4))
    return total / count.clamp(min=least)[:, None]


def magnitude(x: Tensor, eps: float) -> Tensor:
    """Take magnitudes of a spectrum of zeros."""
    z = torch.fft.fft(x * 0)
    return torch.sqrt(z.real**2 + z.imag**2 + eps)


def normed(x: Tensor, eps: float) -> Tensor:
    """Norm groups of equal numbers."""
    return functional.group_norm(x * 0 + 1, 2, eps=eps)


class Odd(NamedTuple):
    """A fault, what is to be said of it, and what ends it."""

    fault: Change
    op: str
    cause: str
    phase: str
    says: str
    mended: Change
    advice: str


ZERO, BACK = ("zero", "forward"), ("zero", "backward")
ADD, CLAMP = "Add a small", "Clamp its argument"
ODD = {
    "slope of one's own": Odd(
        *(lambda x: Reciprocal.apply(x, 0.0), "div", *BACK, "its divisor is 0 at 32"),
        *(lambda x: Reciprocal.apply(x, 1e-3), ADD),
    ),
    "number written in place": Odd(
        *(assigned(math.inf), "fill", *ZERO, "that it fills in reaches the loss"),
        *(assigned(9.0), "Keep that infinity out"),
    ),
    "row of -inf in logsumexp": Odd(
        *(lambda x: x + masked(x).logsumexp(-1, keepdim=True), "logsumexp", *ZERO),
        "a mask covers a whole row",
        lambda x: x + masked(x, CORNER).logsumexp(-1, keepdim=True),
        "Leave something in each row",
    ),
    "-inf in logaddexp": Odd(
        *(lambda x: torch.logaddexp(masked(x, CORNER), masked(x, CORNER)),),
        *("masked_fill", *ZERO, "inf at 4 of 32 places that it fills in reaches"),
        lambda x: torch.logaddexp(masked(x, CORNER, -9e3), masked(x, CORNER, -9e3)),
        "mask with a large finite number",
    ),
    "determinant of zero": Odd(
        *(lambda x: whitened(x, 0.0), "linalg_slogdet", *ZERO, "the determinant is 0"),
        *(lambda x: whitened(x, 1e-3), "Add a small multiple of the identity"),
    ),
    "gamma at a pole": Odd(
        *(lambda x: torch.lgamma(x * 0 - 1), "lgamma", *ZERO, "a whole number below"),
        *(lambda x: torch.lgamma(x * 0 + 0.5), "Keep its argument away from 0"),
    ),
    "division in place": Odd(
        *(lambda x: in_place(x, 0.0), "div", *ZERO, "its divisor is 0 at 32 of 32"),
        *(lambda x: in_place(x, 1e-3), ADD),
    ),
    "empty group": Odd(
        *(lambda x: grouped(x, 0.0), "div", *ZERO, "its divisor is 0 at 1 of 3"),
        *(lambda x: grouped(x, 1.0), "clamp it away from 0"),
    ),
    "magnitude of a spectrum": Odd(
        *(lambda x: magnitude(x, 0.0), "sqrt", *BACK, "its slope is infinite"),
        *(lambda x: magnitude(x, 1e-6), ADD),
    ),
    "complex logarithm": Odd(
        *(lambda x: torch.log(torch.fft.fft(x * 0)).real, "log", *ZERO, "is 0 at 32"),
        *(lambda x: torch.log(torch.fft.fft(x * 0) + 1e-3).real, ADD),
    ),
    "root behind where": Odd(
        *(lambda x: x + torch.where(x > 0, (x * 0).sqrt(), 0.0), "sqrt", *BACK),
        "its slope is infinite",
        *(lambda x: x + torch.where(x > 0, (x * 0 + 1e-6).sqrt(), 0.0), ADD),
    ),
    "variance of one": Odd(
        *(lambda x: x / (1 + x[:1].var(0)), "var", *ZERO, "the deviation of 1 number"),
        *(lambda x: x / (1 + x[:1].var(0, correction=0)), "or with correction=0"),
    ),
    "norm of equals": Odd(
        *(lambda x: normed(x, 0.0), "group_norm", *ZERO, "its variance is 0"),
        *(lambda x: normed(x, 1e-5), "Give the norm an eps above 0"),
    ),
    "equal eigenvalues": Odd(
        lambda x: x @ torch.linalg.eigh(torch.eye(8) + 0 * (x.mT @ x))[1],
        *("linalg_eigh", *BACK, "its divisor is 0"),
        lambda x: x @ torch.linalg.eigh(torch.eye(8) * torch.arange(8) + x.mT @ x)[1],
        ADD,
    ),
    "negative below a root": Odd(
        *(lambda x: x**1.5, "pow", *ZERO, "it raises a negative number to a power"),
        *(lambda x: x.clamp(min=1e-3) ** 1.5, CLAMP),
    ),
    "angle between equals": Odd(
        *(lambda x: x + torch.acos(x * 0 + 1), "acos", *BACK, "argument is -1 or 1"),
        *(lambda x: x + torch.acos((x * 0 + 1).clamp(-0.999, 0.999)), CLAMP),
    ),
    "exp of a hundred": Odd(
        *(lambda x: torch.exp(x * 0 + 100), "exp", "forward range", "forward"),
        *("float32 holds 3.40282e+38", lambda x: torch.exp((x + 100).clamp(max=20))),
        "clamp its argument",
    ),
}


@pytest.mark.filterwarnings("ignore:var")  # torch sees it too
@pytest.mark.parametrize("name", ODD)
def test_it_is_told(name: str) -> None:
    """Law: module, operation, cause and phase are right, with a number or a value."""
    odd, bad = ODD[name], found(Net(ODD[name].fault))
    assert bad is not None
    told = (bad.module, bad.op, bad.cause, bad.phase)
    assert told == ("mid", odd.op, odd.cause, odd.phase), str(bad)
    assert odd.says in bad.evidence
    assert odd.advice in bad.advice


@pytest.mark.parametrize("name", ODD)
def test_what_is_advised_ends_it(name: str) -> None:
    """Law: with the advice followed, loss and gradients are finite."""
    assert found(Net(ODD[name].mended)) is None


def test_a_row_for_a_layer_that_runs_twice() -> None:
    """Law: where a row is advised, it parses, and the step is finite under it."""

    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(self.inner(x)) * 1e-6)  # type: ignore[no-any-return]

    model = Twice(lambda x: x)
    nn.init.constant_(model.inner.weight, 100.0)
    bad = required(found(model, X.abs() + 1, torch.float16))
    assert (bad.module, bad.cause) == ("inner", "forward range")
    assert hs.Policy.parse(f"torch + {bad.rule}")
    assert found(model, X.abs() + 1, torch.float16, bad.rule) is None
    assert found(model, X.abs() + 1, torch.bfloat16) is None


def test_blocks_recomputed_in_blocks() -> None:
    """Law: the innermost module of nested checkpoints is told, in either pass."""

    class Block(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.before, self.inside = nn.Linear(8, 8), inside

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x)
            return checkpoint(self.inside, y, use_reentrant=False)  # type: ignore[no-any-return]

    root = Mid(lambda x: (x * 0).sqrt() + x)
    bad = required(found(Block(Block(root))))
    assert (bad.module, bad.op, bad.phase) == ("inside.inside", "sqrt", "backward")
    wide = nn.Linear(8, 8)
    nn.init.constant_(wide.weight, 6e4)
    bad = required(found(Block(Block(wide)), torch.ones(4, 8), torch.float16))
    assert (bad.module, bad.op) == ("inside.inside", "linear")


def test_work_of_a_modules_hooks_is_its_own() -> None:
    """Law: what a hook makes of a module's result or gradient is told there."""
    model = Net(lambda x: x)
    model.inner.register_forward_hook(lambda _m, _i, out: torch.log(out * 0))
    bad = required(found(model))
    assert (bad.module, bad.kind, bad.op) == ("inner", "Linear", "log")
    model = Net(lambda x: x)
    model.outer.register_full_backward_hook(lambda _m, g, _o: (g[0] * 1e30 * 1e30,))
    bad = required(found(model))
    assert (bad.module, bad.op, bad.phase) == ("outer", "mul", "backward")


def test_a_running_variance_below_zero() -> None:
    """Law: a buffer that no variance can be is told as what is stored wrongly."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    model[1].running_var[2] = -1.0  # type: ignore[operator, index]
    bad = required(found(model))
    assert (bad.module, bad.op, bad.cause) == ("1", "batch_norm", "weight")
    assert (bad.phase, "negative at 1 of 8 places" in bad.evidence) == ("weight", True)
    model[1].reset_running_stats()  # type: ignore[operator]
    assert found(model) is None


def test_running_statistics_with_nan() -> None:
    """Law: statistics that a bad batch wrote are reset, and no checkpoint is needed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model(torch.full((4, 8), torch.inf))
    bad = required(found(model.eval()))
    assert "buffer 1.running_mean held NaN" in bad.evidence
    assert "reset_running_stats()" in bad.advice
    model[1].reset_running_stats()  # type: ignore[operator]
    assert found(model) is None


def test_words_and_places_that_are_not_there() -> None:
    """Law: an index beyond a bag's table, or beyond what a gather has, is told."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(10, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.bag(ids))  # type: ignore[no-any-return]

    model, ids = Bag(), torch.tensor([[1, 30], [2, 4]])
    bad = required(found(model, ids))
    assert (bad.module, bad.op, bad.cause) == ("bag", "embedding_bag", "data")
    assert "index 30 at 1 of 4 places, yet the table has rows 0 to 9" in bad.evidence

    def step() -> Tensor:
        logs = model(ids.clamp(max=9)).log_softmax(-1)
        return -logs.gather(1, torch.tensor([[0], [3]])).mean()

    bad = required(hs.find_nonfinite(model, step))
    assert (bad.module, bad.op, bad.cause) == ("loss", "gather", "label")


class Pair:
    """A container of a user's own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


_pytree.register_pytree_node(Pair, lambda p: ([p.x], None), lambda x, _: Pair(*x))


class Arguments(Net):
    """A model that takes any arguments, and adds what is in them."""

    def forward(self, pair: Any, *more: Tensor, **named: Tensor) -> Tensor:
        """Return one number a row."""
        first = pair["x"] if isinstance(pair, dict) else pair.x
        return super().forward(first + sum((*more, *named.values())))


NAN_X = X * math.nan
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Tensor]]] = {
    "\"pair['x']\"": (({"x": NAN_X},), {}),
    "'pair'": ((Pair(NAN_X),), {}),
    "'argument 1'": ((Pair(X), NAN_X), {"bias": X}),
    "'bias'": ((Pair(X), X), {"bias": NAN_X}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_names(name: str) -> None:
    """Law: an argument is named, also inside of containers; else by its position."""
    args, kwargs = ARGUMENTS[name]
    model = Arguments(lambda x: x)
    bad = required(hs.find_nonfinite(model, lambda: model(*args, **kwargs).sum()))
    assert bad.cause == "data"
    assert f"argument {name} of the model holds NaN at 32 of 32" in bad.evidence


def test_memory_that_is_given_out_again() -> None:
    """Law: what lay in freed memory is not blamed for what lies there now."""

    def change(x: Tensor) -> Tensor:
        for _ in range(50):
            masked(x, CORNER)
        # Made outside of torch, so that no operation is known to have made it.
        spoilt = torch.from_numpy(x.detach().numpy() * math.nan)
        return x + spoilt

    bad = required(found(Net(change)))
    assert (bad.module, bad.op, bad.cause) == ("mid", "add", "data")

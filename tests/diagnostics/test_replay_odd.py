"""`find_nonfinite` in odd places, and over several micro-batches."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.diagnostics.replay.search import Step
from halfstep.nonfinite.origin import BadOp

Change = Callable[[Tensor], Tensor]


X = torch.linspace(-1, 1, 32).sin().view(4, 8)


class Mid(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.mid = Mid(change)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.mid(self.inner(x)))


def found(model: nn.Module, x: Any = X, *, fp16: bool = False) -> BadOp | None:
    """Return what is said of a model in fp32, or in a region of float16."""

    def step() -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=fp16):
            return model(x).float().square().mean()

    return hs.find_nonfinite(model, step) or None


class Reciprocal(torch.autograd.Function):
    """A slope of one's own, which divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] / (x - x)


def assigned(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = math.inf
    return y


FIRST = torch.tensor([[True]] + [[False]] * 3)
CORNER = torch.eye(4, 8, dtype=torch.bool)


def masked(x: Tensor, places: Tensor) -> Tensor:
    return x.masked_fill(places, -math.inf)


ODD: dict[str, tuple[Change, str, str, str]] = {
    "slope of one's own": (Reciprocal.apply, "div", "backward", "divisor is 0 at 32"),
    "number written in place": (assigned, "fill", "forward", "that it fills in"),
    "row of -inf in logsumexp": (
        lambda x: x + masked(x, FIRST).logsumexp(-1, keepdim=True),
        *("logsumexp", "forward", "a mask covers a whole row"),
    ),
    "-inf in logaddexp": (
        lambda x: torch.logaddexp(masked(x, CORNER), masked(x, CORNER)),
        *("masked_fill", "forward", "inf at 4 of 32 places that it fills in reaches"),
    ),
    "determinant of zero": (
        lambda x: x + torch.linalg.slogdet((x.mT @ x) * 0)[1],
        *("linalg_slogdet", "forward", "the determinant is 0"),
    ),
    "gamma at a pole": (
        lambda x: torch.lgamma(x * 0 - 1),
        *("lgamma", "forward", "a whole number below"),
    ),
    "division in place": (
        lambda x: (x * 1).div_((x - x).detach()),
        *("div", "forward", "its divisor is 0 at 32 of 32"),
    ),
    "complex logarithm": (
        lambda x: torch.log(torch.fft.fft(x * 0)).real,
        *("log", "forward", "is 0 at 32"),
    ),
    "equal eigenvalues": (
        lambda x: x @ torch.linalg.eigh(torch.eye(8) + 0 * (x.mT @ x))[1],
        *("linalg_eigh", "backward", "its divisor is 0"),
    ),
    "negative below a root": (
        lambda x: x**1.5,
        *("pow", "forward", "it raises a negative number to a power"),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_where_an_operation_is_undefined(name: str) -> None:
    """Law: module, operation and phase are right; the evidence says at which value."""
    change, op, phase, says = ODD[name]
    bad = required(found(Net(change)))
    assert (bad.module, bad.op, bad.phase) == ("mid", op, phase), str(bad)
    assert bad.cause == "zero"
    assert says in bad.evidence


def test_blocks_recomputed_in_blocks() -> None:
    """Law: the innermost module of nested checkpoints is told, in either pass."""

    class Block(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.before, self.inside = nn.Linear(8, 8), inside

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x)
            return checkpoint(self.inside, y, use_reentrant=False)

    root = Mid(lambda x: (x * 0).sqrt() + x)
    bad = required(found(Block(Block(root))))
    assert (bad.module, bad.op, bad.phase) == ("inside.inside", "sqrt", "backward")
    wide = nn.Linear(8, 8)
    nn.init.constant_(wide.weight, 6e4)
    bad = required(found(Block(Block(wide)), torch.ones(4, 8), fp16=True))
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


def test_running_statistics() -> None:
    """Law: a variance below 0 is stored wrongly; NaN of a bad batch is reset."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    model[1].running_var[2] = -1.0
    bad = required(found(model))
    assert (bad.module, bad.op, bad.cause) == ("1", "batch_norm", "weight")
    assert (bad.phase, "negative at 1 of 8 places" in bad.evidence) == ("weight", True)
    model[1].reset_running_stats()
    assert found(model) is None
    model.train()(torch.full((4, 8), torch.inf))
    bad = required(found(model.eval()))
    assert "buffer 1.running_mean held NaN" in bad.evidence
    assert "reset_running_stats()" in bad.advice
    model[1].reset_running_stats()
    assert found(model) is None


def test_words_and_places_that_are_not_there() -> None:
    """Law: an index beyond a bag's table, or beyond what a gather has, is told."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(10, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.bag(ids))

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
    def __init__(self, x: Tensor) -> None:
        self.x = x


_pytree.register_pytree_node(Pair, lambda p: ([p.x], None), lambda x, _: Pair(*x))


class Arguments(Net):
    """A model that takes any arguments, and adds what is in them."""

    def forward(self, pair: Any, *more: Tensor, **named: Tensor) -> Tensor:
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


# First bad operation over several micro-batches: each alone, and their sum.


PARTS = 4


class Half(nn.Module):
    """Two layers in fp16; the gradient of the second is what the loss multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4).half()
        self.outer = nn.Linear(4, 1, bias=False).half()

    def forward(self, x: Tensor) -> Tensor:
        # A row of ones, whatever comes in, so that slopes are known.
        return self.outer(self.inner(x) * 0 + 1)


X_SUMS = torch.ones(1, 4).half()


def steps(model: nn.Module, factor: float, parts: int = PARTS) -> list[Step]:
    return [lambda: (model(X_SUMS) * factor).float().sum() for _ in range(parts)]


def added_up(model: nn.Module, given: list[Step], scale: float) -> bool:
    for step in given:
        (step() * scale).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return all(bool(grad.isfinite().all()) for grad in found)


def test_a_sum_that_overflows_is_no_fault_of_hardware() -> None:
    """Law: where each micro-batch is finite and their fp16 sum is not, that is told."""
    model = Half()
    given = steps(model, 3e4)
    assert added_up(model, given[:1], 1.0)
    assert not added_up(model, given, 1.0)
    bad = required(hs.find_nonfinite(model, given, failed=True))
    assert (bad.cause, bad.phase) == ("backward range", "backward")
    assert (bad.module, bad.kind, bad.op) == ("outer", "Linear", "add")
    assert (bad.dtype, bad.inputs, bad.nonfinite_kind) == ("float16", 3e4, "inf")
    assert bad.reproduced
    assert not bad.normal
    assert "gradients of 4 micro-batches are finite, up to 3.0e+04" in bad.evidence
    assert "in 1 of 3 parameters (outer.weight first)" in bad.evidence
    assert "prepare(level='O2', accumulate=4)" in bad.advice
    assert "divide each loss by 4" in bad.advice
    # Each remedy ends it.
    assert not hs.find_nonfinite(model, given, summed_in=torch.float32)
    divided = steps(model, 3e4 / PARTS)
    assert not hs.find_nonfinite(model, divided)
    assert added_up(model, divided, 1.0)


def test_a_smaller_scale_cures_a_sum() -> None:
    """Law: a sum that is finite at scale 1 is told to be normal."""
    model = Half()
    given = steps(model, 30.0)
    assert added_up(model, given, 1.0)
    assert not added_up(model, given, 2.0**10)
    bad = required(hs.find_nonfinite(model, given, scale=2.0**10, failed=True))
    assert (bad.cause, bad.normal) == ("backward range", True)
    assert "at loss scale 1024; at scale 1 the sum is finite" in bad.evidence
    assert added_up(model, given, 2.0**9)


def test_the_micro_batch_is_named() -> None:
    """Law: of several micro-batches, the one that is bad by itself is named."""
    model = Half()
    given = steps(model, 1.0)
    spoilt = X_SUMS * float("nan")
    given[2] = lambda: model(spoilt).sum()
    bad = required(hs.find_nonfinite(model, given))
    assert (bad.module, bad.cause) == ("inner", "data")
    assert bad.evidence.endswith("(micro-batch 3 of 4)")
    assert not hs.find_nonfinite(model, steps(model, 1.0))


def test_micro_batches_draw_on_from_each_other() -> None:
    """Law: each begins with the random numbers that the one before it has left.

    The first begins with `generator_state`, not with the current state.
    """
    model, drawn = Half(), []

    def step() -> Tensor:
        drawn.append(float(torch.rand(())))
        return model(X_SUMS).float().sum()

    state = torch.get_rng_state()
    expected = torch.rand(2).tolist()
    now = torch.get_rng_state()
    assert not hs.find_nonfinite(model, [step, step], generator_state=state)
    assert drawn == expected
    assert torch.equal(torch.get_rng_state(), now)


def test_hardware_is_named_once_the_sum_was_looked_at() -> None:
    """Law: for one micro-batch the sum is a suspect; for all of them it is none."""
    model = Half()
    alone = hs.find_nonfinite(model, steps(model, 1.0, 1), failed=True)
    together = hs.find_nonfinite(model, steps(model, 1.0), failed=True)
    assert alone is not None
    assert together is not None
    assert alone.cause == together.cause == "hardware"
    assert "give a list with one step for each" in alone.advice
    assert "micro-batches" not in together.advice


def test_a_sum_of_sparse_gradients_beyond_float32() -> None:
    """Law: rows of an embedding are added; bfloat16, no wider, is not advised."""
    table, ids = nn.Embedding(5, 2, sparse=True), torch.tensor([1, 1])
    nn.init.zeros_(table.weight)

    def step() -> Tensor:
        return (table(ids) * 1e38).sum()

    assert not hs.find_nonfinite(table, [step])
    bad = required(hs.find_nonfinite(table, [step] * 2))
    assert (bad.module, bad.op, bad.dtype) == ("model", "add", "float32")
    assert bad.advice == "Divide each loss by 2."


@pytest.mark.parametrize(
    ("norm", "factor", "runs"),
    [
        (nn.BatchNorm1d, 1.0, 3),
        (nn.BatchNorm1d, math.nan, 1),
        (nn.SyncBatchNorm, 1.0, 9),
        (nn.SyncBatchNorm, math.nan, 9),
    ],
)
def test_all_processes_run_as_many(
    norm: type[nn.Module], factor: float, runs: int
) -> None:
    """Law: where norms exchange, no finding of one process spares it a pass."""
    model, count = nn.Sequential(nn.Linear(4, 4), norm(4)), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        return model(torch.eye(4)).square().sum() * factor

    bad = hs.find_nonfinite(model, [step] * 3, scale=2.0)
    assert (not bad, count) == (factor == 1, runs)

"""The contenders of `halfstep bench recipe`: they train the same, and tell what."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.bench import accumulate, recipe_loops, worker_process
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = recipe_loops.Workload("cpu", "bf16", 2, 8, 4, 3, optimizer="sgd")
"""Two layers of 8 x 8, three micro-batches of 4."""


@pytest.fixture(autouse=True, scope="module")
def _measured() -> Iterator[None]:
    """Plant rates that warn of nothing."""
    with pytest.MonkeyPatch.context() as patch:
        rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
        patch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
        yield


@pytest.mark.parametrize("optimizer", recipe_loops.OPTIMIZERS)
def test_the_loss_falls(optimizer: str) -> None:
    """Law: each optimizer, as it is set, learns at any size.

    A loss that stays put would show no contender's fault.
    """
    for width, batch in ((8, 64), (64, 4)):
        work = replace(WORK, optimizer=optimizer, width=width, batch=batch)
        loop, batches = (
            recipe_loops.make_loop("fp32", work),
            accumulate.draw_batches(work),
        )
        losses = [loop.step(batches).item() for _ in range(12)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] * (1 - 2**-8)  # which bf16 would tell


def trained(name: str, work: recipe_loops.Workload = WORK) -> list[float]:
    """Return the losses of a contender's first steps."""
    loop, batches = recipe_loops.make_loop(name, work), accumulate.draw_batches(work)
    return [loop.step(batches).item() for _ in range(4)]


_LOST = 2 * 2 * 2**-9
TORCHS = ("torch.amp", "naive-O2", "pure", "O1", "O2", "O3")


@pytest.mark.parametrize("name", TORCHS)
def test_contenders_learn_alike(name: str) -> None:
    """Law: losses are those of fp32, but for what bf16 loses.

    That is 2**-9 in weights and in activations of each of two layers, at worst all one
    way: less than the way that the loss has come.
    """
    work = replace(WORK, width=64, optimizer="sgd-momentum")
    theirs, ours = trained("fp32", work), trained(name, work)
    assert theirs[0] - theirs[-1] > _LOST
    assert ours == pytest.approx(theirs, rel=_LOST)


def test_micro_batches_are_averaged() -> None:
    """Law: by hand too, a step on two equal micro-batches is a step on one."""
    one, two = replace(WORK, accumulate=1), replace(WORK, accumulate=2)
    (batch,) = accumulate.draw_batches(one)
    for name in ("naive-O2", "pure"):
        alone, twice = (
            recipe_loops.make_loop(name, one),
            recipe_loops.make_loop(name, two),
        )
        for _ in range(3):
            assert torch.equal(alone.step([batch]), twice.step([batch, batch]))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_by_hand(dtype: str) -> None:
    """Law: masters move by the rate times the gradient of the 16-bit weights.

    Those follow, rounded. The fp16 gradient comes from a scaled loss. None is left.
    """
    work = replace(WORK, dtype=dtype, accumulate=1)
    loop = recipe_loops.make_loop("naive-O2", work)
    assert isinstance(loop, recipe_loops.ManualLoop)
    assert loop._scaler.is_enabled() == (dtype == "fp16")
    if dtype == "fp16":  # one that so small a network bears
        loop._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = [master.clone() for _, master in loop._pairs]
    twin = recipe_loops.make_loop("fp32", work)
    assert isinstance(twin, recipe_loops.PlainLoop)
    for param, master in zip(twin.model.parameters(), before, strict=True):
        assert torch.equal(param, master)
        param.data = master.to(loop._dtype).double()
    ((inputs, targets),) = accumulate.draw_batches(work)
    accumulate.loss_of(twin.model, (inputs.double(), targets.double())).backward()
    loop.step([(inputs, targets)])
    rate = loop._optimizer.param_groups[0]["lr"]
    low = torch.finfo(loop._dtype).eps / 2
    for (weight, master), old, param in zip(
        loop._pairs, before, twin.model.parameters(), strict=True
    ):
        assert weight.dtype == loop._dtype
        assert torch.equal(weight, master.to(loop._dtype))
        assert param.grad is not None
        moved, expected = (master - old).double(), -rate * param.grad
        # Inputs, two weights, two outputs, the error: each is rounded once, and the
        # backward pass rounds as often.
        assert (moved - expected).norm() < 12 * low * expected.norm()
        assert weight.grad is None
        assert master.grad is None


class Fake:
    """An optimizer that waits for the last of some micro-batches."""

    def __init__(self, model: nn.Module, optimizer: Any, every: int) -> None:
        self.model, self.inner, self.every, self.count = model, optimizer, every, 0

    def step(self) -> None:
        """Step after the last micro-batch."""
        if self.count % self.every == 0:
            self.inner.step()

    def zero_grad(self) -> None:
        """Clear after the last micro-batch."""
        if self.count % self.every == 0:
            self.inner.zero_grad()


def test_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: Accelerate is told dtype, device and micro-batches.

    It is given the loop that it documents: with a stand-in that casts nothing, fp32.
    """
    told: dict[str, Any] = {}

    class Accelerator:
        def __init__(self, **settings: Any) -> None:
            told.update(settings)

        def prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Fake]:
            every = told["gradient_accumulation_steps"]
            self.both = Fake(model, optimizer, every)
            return model, self.both

        @contextmanager
        def accumulate(self, model: nn.Module) -> Iterator[None]:
            assert model is self.both.model
            self.both.count += 1
            yield

        def backward(self, loss: Tensor) -> None:
            (loss / self.both.every).backward()

    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(**locals()))
    assert trained("accelerate") == trained("fp32")
    assert told == {
        "mixed_precision": "bf16",
        "cpu": True,
        "gradient_accumulation_steps": 3,
    }


@pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    [
        ("fabric-mixed", "bf16", "bf16-mixed"),
        ("fabric-true", "bf16", "bf16-true"),
        ("fabric-mixed", "fp16", "16-mixed"),
        ("fabric-true", "fp16", "16-true"),
    ],
)
def test_fabric(
    name: str, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: Fabric is told precision and one device, and given the loop it documents."""
    told: dict[str, Any] = {}

    class Fabric:
        def __init__(self, **settings: Any) -> None:
            told.update(settings)

        def setup(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
            return model, optimizer

        def backward(self, loss: Tensor) -> None:
            loss.backward()

    monkeypatch.setitem(sys.modules, "lightning_fabric", SimpleNamespace(**locals()))
    assert trained(name, replace(WORK, dtype=dtype)) == trained("fp32")
    assert told == {"accelerator": "cpu", "devices": 1, "precision": precision}


@pytest.mark.parametrize("name", ["accelerate", "fabric-mixed", "fabric-true"])
def test_peers_themselves(name: str) -> None:
    """Law: where a peer is installed, it learns as torch.amp does, but for rounding."""
    package = recipe_loops.CONTENDERS[name].package
    if package is None or find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    work = replace(WORK, width=64, optimizer="sgd-momentum")
    assert trained(name, work) == pytest.approx(trained("fp32", work), rel=2**-7)


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a turn takes so many steps, and tells seconds of one, and the last loss.

    Memory is the most beyond what was held before there was any model.
    """
    steps: list[int] = []

    class Loop:
        def step(self, batches: accumulate.Batches) -> Tensor:
            steps.append(len(batches))
            return torch.tensor(0.5 / len(steps))

    monkeypatch.setattr(recipe_loops, "make_loop", lambda *_: Loop())
    monkeypatch.setattr(worker_process, "resident", lambda _: 1000 + len(steps))
    monkeypatch.setattr(worker_process, "peak_resident", lambda _: 3001)
    monkeypatch.setattr(
        recipe_loops.measure,
        "timed",
        lambda call, device: (call(), 6.0 if device else 0),
    )
    turns = recipe_loops.StepServer("O2", WORK)
    assert steps == [3]  # one on small ones, before memory is asked for
    found = turns.answer(2)
    assert steps == [3] * 3
    assert found == {
        "refused": None,
        "seconds": 3.0,
        "loss": pytest.approx(0.5 / 3),
        "peak_bytes": 2000,
    }


def test_refusals_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what `prepare` refuses is told, and no death; any other fault is raised."""

    def refuse(*_: object) -> recipe_loops.Loop:
        message = "no such master"
        raise UserError(message)

    monkeypatch.setitem(recipe_loops.CONTENDERS, "O3", recipe_loops.Contender(refuse))
    assert recipe_loops.StepServer("O3", WORK).answer(1) == {
        "refused": "no such master"
    }
    monkeypatch.setitem(
        recipe_loops.CONTENDERS, "O3", recipe_loops.Contender(lambda *_: 1 / 0)
    )  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        recipe_loops.StepServer("O3", WORK).answer(1)

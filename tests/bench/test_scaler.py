"""`halfstep bench scaler`: its candidates do the same work, and its table."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from bench_runs import flags, tables

from halfstep.bench import measure, scaler
from halfstep.scaling.grad_scaler import GradScaler

T = TypeVar("T")

SCALERS = {"torch": torch.amp.GradScaler, "halfstep": GradScaler}


def gradients_of(gradients: scaler.Gradients) -> list[torch.Tensor]:
    return [p.grad.clone() for p in gradients.parameters if p.grad is not None]


def test_gradients() -> None:
    """Law: as many as asked for, as large, the same each time, and again on demand."""
    gradients, same = (scaler.Gradients.draw("5x3", "cpu") for _ in range(2))
    before = gradients_of(gradients)
    assert [tuple(each.shape) for each in before] == [(3, 3)] * 5
    assert all(map(torch.equal, before, gradients_of(same)))
    assert min(each.abs().min() for each in before) > 0
    for parameter in gradients.parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    gradients.reset()
    assert all(map(torch.equal, before, gradients_of(gradients)))


def test_optimizers() -> None:
    """Law: each optimizer can be made; the fused ones are fused."""
    for name in scaler.OPTIMIZERS:
        parameters = scaler.Gradients.draw("2x3", "cpu").parameters
        optimizer = scaler.OPTIMIZERS[name](parameters)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        assert fused == name.endswith("-fused"), name


def test_idle() -> None:
    """Law: an idle step moves nothing, and the optimizer holds state for each weight.

    A scaler that walks over the state must find as much as it would in training.
    """
    gradients = scaler.Gradients.draw("3x2", "cpu")
    idle = scaler.NoOpOptimizer(gradients.parameters)
    idle.step()
    assert all(not parameter.any() for parameter in gradients.parameters)
    assert set(idle.state) == set(gradients.parameters)


def counting(name: str, updates: list[str]) -> type[torch.amp.GradScaler]:
    class Counting(SCALERS[name]):  # type: ignore[misc]
        def update(self, new_scale: float | torch.Tensor | None = None) -> None:
            updates.append(name)
            super().update(new_scale)

    return Counting


@pytest.mark.parametrize("name", ["none", "sgd", "sgd-fused"])
def test_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each timed step finds the gradients as drawn and no two steps share a clock.

    Both scalers leave the same gradients, unscaled exactly, and the same new weights.
    They take turns, as many steps of each.
    """
    updates: list[str] = []
    for owner, kind in ((torch.amp, "torch"), (scaler, "halfstep")):
        monkeypatch.setattr(owner, "GradScaler", counting(kind, updates))
    left: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    gradients = scaler.Gradients.draw("4x3", "cpu")
    drawn = gradients_of(gradients)

    def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
        assert device == "cpu"
        assert all(map(torch.equal, drawn, gradients_of(gradients)))
        with torch.no_grad():
            for parameter in gradients.parameters:
                parameter.zero_()
        result = call()
        weights = [parameter.detach().clone() for parameter in gradients.parameters]
        left.append((gradients_of(gradients), weights))
        return result, 2**-10

    monkeypatch.setattr(measure, "timed", timed)
    # The state of AdamW would tell the steps apart.
    optimizer = scaler.OPTIMIZERS[name](gradients.parameters)
    words = flags("scaler", "--calls 2 --rounds 3 --device cpu")
    times = scaler.take_times(gradients, optimizer, words)
    assert dict(times.rounds) == dict.fromkeys(
        ("bare", "torch", "halfstep"), [2**-10] * 3
    )
    assert len(left) == 3 + 3 + 3 * 3 * 2  # once each, the trial, rounds of 2 calls
    both = ["torch"] * 2 + ["halfstep"] * 2
    assert updates[:5] == ["torch", "halfstep", *["torch"] * 3]
    assert updates[5:] == both + both[::-1] + both
    torchs, ours = left[1], left[2]
    for theirs, own in zip(torchs, ours, strict=True):
        assert all(map(torch.equal, theirs, own))
    assert all(torch.equal(a, b * 2**-16) for a, b in zip(ours[0], drawn, strict=True))
    assert all(bool(weight.all()) == (name != "none") for weight in ours[1])


def test_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: what is added is over the bare step; targets stand where there are some."""
    rounds = {"bare": [1e-3] * 3, "torch": [3e-3] * 3, "halfstep": [2e-3] * 3}
    monkeypatch.setattr(scaler, "take_times", lambda *_: measure.Times(rounds))
    monkeypatch.setitem(scaler.TARGETS, "2x1", 0.25)
    words = "--shapes 2x1,1x1 --optimizer none,sgd,sgd-fused --calls 1"
    words += " --device cpu --rounds 3"
    (table,) = tables("scaler", words)
    assert table.title == "GradScaler"
    # What is added, its ratio; then of whole steps the ratio, and the spread.
    numbers = *map(pytest.approx, (1000.0, 2000.0, 1000.0, 0.5, 2 / 3)), 0.0
    assert table.rows == (
        ("2x1", "none", *numbers, "faster", 0.25, False),
        ("2x1", "sgd", *numbers, "faster", None, None),
        ("2x1", "sgd-fused", *numbers, "faster", 0.25, False),
        ("1x1", "none", *numbers, "faster", None, None),
        ("1x1", "sgd", *numbers, "faster", None, None),
        ("1x1", "sgd-fused", *numbers, "faster", None, None),
    )
    assert scaler.TARGETS.keys() == {"1000x16", "3x4096", "2x1"}
    assert capsys.readouterr().err.splitlines()[0] == "2x1, none: done"


@pytest.mark.parametrize(("torchs", "ours"), [(1.0, 2.0), (2.0, 1.0), (0.5, 0.5)])
def test_noise(torchs: float, ours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where a step with a scaler took no longer than one without, no ratio."""
    rounds = {"bare": [1.0], "torch": [torchs], "halfstep": [ours]}
    monkeypatch.setattr(scaler, "take_times", lambda *_: measure.Times(rounds))
    words = "--shapes 1000x16 --optimizer sgd-fused --device cpu"
    monkeypatch.setattr(scaler.Gradients, "draw", lambda *_: scaler.Gradients([], []))
    monkeypatch.setitem(scaler.OPTIMIZERS, "sgd-fused", lambda _: None)
    (table,) = tables("scaler", words)
    assert table.rows[0][5] is None
    assert table.rows[0][-3:] == (None, 0.5, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    """Law: on a GPU each turn waits for the device, and takes some time."""
    gradients = scaler.Gradients.draw("4x8", "cuda")
    for name in scaler.OPTIMIZERS:
        optimizer = scaler.OPTIMIZERS[name](gradients.parameters)
        words = flags("scaler", "--calls 2 --rounds 2 --device cuda")
        times = scaler.take_times(gradients, optimizer, words)
        seconds = [times.median(each) for each in ("bare", "torch")]
        assert 0 < seconds[0] < seconds[1]  # type: ignore[operator]

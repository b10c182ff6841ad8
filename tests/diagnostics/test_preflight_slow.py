"""A check where products or steps are slow: what is cut, and that it is said."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checked_nets import LOUD, Net, batch, loss
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.diagnostics.preflight import step_cost
from halfstep.machine import fp16_emulation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from halfstep.diagnostics.preflight import CheckReport


def checked(loss_fn: Any = loss, level: str = "O1", **more: Any) -> CheckReport:
    """Check a network in fp16."""
    given = {"model": Net(), "batch": batch(), "steps": 0} | more
    return hs.check(loss_fn=loss_fn, level=level, dtype="fp16", **given)


def notes_of(report: CheckReport) -> list[str]:
    """Return what was left out."""
    return [one.measured for one in report.findings if one.rule == "note"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("gain", [1.0, LOUD])
def test_products_in_fp32(
    level: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: with products in fp32 a check says what it says with fp16's, and says so."""
    own = checked(level=level, model=Net(gain))
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: True)
    wide = checked(level=level, model=Net(gain))
    assert not notes_of(own)
    assert "computed in fp32 and rounded" in notes_of(wide)[0]
    assert wide.verdict == own.verdict
    one, other = wide.facts, own.facts
    assert (one.fault, one.rules) == (other.fault, other.rules)
    assert one.safe_scale == other.safe_scale
    assert one.gradients is not None
    assert one.gradients.cosine > 0.999
    assert one.loss == pytest.approx(other.loss, rel=2**-9)
    bf16 = hs.check(Net(), loss, batch(), level=level, dtype="bf16", steps=0)
    assert not notes_of(bf16)


class Running(TorchDispatchMode):
    """Takes down the dtype of each product."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        del types
        if func is torch.ops.aten.mm.default:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [0, 1])
def test_steps_are_the_machines_own(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: passes take fp32 products where fp16's are slow; timed steps never do."""
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: True)
    with Running() as running:
        checked(steps=steps)
    assert (torch.float16 in running.seen) is bool(steps)


class Sizes:
    """A loss that takes down how many examples it is given, and refuses too few."""

    def __init__(self, least: int = 1) -> None:
        self.least, self.seen = least, list[int]()

    def __call__(self, model: nn.Module, given: Any) -> Tensor:
        """Return the loss."""
        self.seen.append(len(given[0]))
        if len(given[0]) < self.least:
            message = "too few"
            raise ValueError(message)
        return loss(model, given)


@pytest.mark.parametrize("slow", [True, False])
def test_steps_that_take_long(*, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: there are then fewer, on the fewest examples that run, and notes say so."""
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: slow)
    monkeypatch.setattr(step_cost, "_LONGEST", 0.0)
    sizes = Sizes()
    report = checked(sizes, steps=5)
    assert sizes.seen[-6:] == [2] * 6  # a warm-up, a step and the last one, of each
    told = notes_of(report)
    assert any(one.startswith("steps were made with 1/16 of the batch") for one in told)
    assert any(one.startswith("1 of 5 steps were timed") for one in told)
    assert report.facts.speed_up is not None
    assert report.facts.memory_saved is not None
    whole = checked(steps=5).facts
    assert whole.cost is not None
    assert report.facts.cost is not None
    assert whole.cost.memory == report.facts.cost.memory
    picky = Sizes(least=32)
    told = notes_of(checked(picky, steps=5))
    assert picky.seen[-6:] == [32] * 6
    assert not any("of the batch:" in one for one in told)
    assert any(one.startswith("1 of 5 steps were timed") for one in told)


def test_time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where there is time, all steps are timed, on the whole batch."""
    monkeypatch.setattr(step_cost, "_LONGEST", math.inf)
    sizes = Sizes()
    report = checked(sizes, steps=3)
    assert sizes.seen[-10:] == [32] * 10
    assert not notes_of(report)

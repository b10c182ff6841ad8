"""A check where products or steps are slow: what is cut, and that it is said."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from checked_nets import LOUD, Net, batch, loss

import halfstep as hs
from halfstep.diagnostics.preflight import model_check
from halfstep.machine import fp16_emulation

if TYPE_CHECKING:
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


def test_steps_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: there are then fewer, and a note says so."""
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: False)
    monkeypatch.setattr(model_check, "_MAX_SECONDS", 0.0)
    report = checked(steps=5)
    assert notes_of(report)[0].startswith("1 of 5 steps were timed")
    assert len(report.facts.ratios) <= 4
    monkeypatch.setattr(model_check, "_MAX_SECONDS", math.inf)
    report = checked(steps=3)
    assert not notes_of(report)
    assert 3 <= len(report.facts.ratios) <= 12


def test_no_steps_without_fp16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where fp16's products are slow, no step is timed, and a note says so."""
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: True)
    report = checked(steps=1)
    assert notes_of(report)[-1].startswith("no steps were timed")
    assert report.facts.cost is None
    assert report.verdict == "good"

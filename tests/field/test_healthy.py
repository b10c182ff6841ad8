"""Programs that are well are accused of nothing."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from tests.field.healthy import HEALTHY, load
from tests.field.report import HALFSTEP, SPEED_RULES, TORCH

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.field.report import Amp, Program

    from halfstep.reporting.finding import Finding

load()
MODELS = [
    name
    for name, build in HEALTHY.items()
    if "models" in getattr(build, "__module__", "")
]
"""Programs with what `hs.check` needs."""


def program(name: str, amp: Amp) -> Program:
    torch.manual_seed(0)
    return HEALTHY[name](amp)


def accusations(findings: Iterable[Finding]) -> list[str]:
    """Return what is said to be wrong; the speed of a small program is not asked."""
    return [
        f"{one.rule}: {one}"
        for one in findings
        if one.severity != "note" and one.rule not in SPEED_RULES
    ]


@pytest.mark.parametrize("amp", [TORCH, HALFSTEP], ids=lambda amp: amp.name)
@pytest.mark.parametrize("name", HEALTHY)
def test_diagnose_accuses_no_healthy_program(name: str, amp: Amp) -> None:
    """Law: as it is, whichever classes it is written with."""
    healthy = program(name, amp)
    diagnosis = hs.diagnose(healthy.step, **healthy.given)
    assert accusations(diagnosis.findings) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_the_classes_warn_of_no_healthy_program(name: str) -> None:
    """Law: a warning would be an error here; and what it trains is well afterwards."""
    healthy = program(name, HALFSTEP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            healthy.step()
    tensors = healthy.model.parameters()
    assert all(bool(each.isfinite().all()) for each in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_check_accuses_no_healthy_model(name: str) -> None:
    """Law: before training, of models that are trained by torch's own loop."""
    healthy = program(name, TORCH)
    report = hs.check(healthy.model, **healthy.check)
    assert report.good
    # A dynamic scale that begins too high settles, so this is no accusation.
    serious = [one for one in report.findings if one.rule != "loss scale"]
    assert accusations(serious) == []

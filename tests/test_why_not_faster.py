"""Programs that are slow for one known reason: the doctor names it first."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from slow_programs import FAST, ON_A_GPU, PROGRAMS, Program
from small_training import one_thread

import halfstep as hs
from halfstep import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

PROFILED = 12
"""Of so many steps the shortest counts: other programs disturb some of them."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Make the shares those of the program.

    With more threads products take less of a step and Python more; and the collector
    would look through all that other tests have left.
    """
    gc.collect()
    gc.freeze()
    with one_thread():
        yield
    gc.unfreeze()


def judged(program: Program, patch: pytest.MonkeyPatch) -> hs.diagnosis.Diagnosis:
    """Return what the doctor finds in a program, on the machine it is meant for."""
    here = dataclasses.replace(
        machine.capabilities(), instruction_sets=("AVX512-BF16", "AMX-BF16")
    )
    patch.setattr(machine, "capabilities", lambda: here)
    patch.setattr(machine, "gemm_rates", lambda *_, **__: program.rates)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # Where 16 bits are emulated, the session warns of it, too.
        warnings.filterwarnings("ignore", message=".*expect .* times the time")
        running = program.start()
    return hs.diagnose(
        running.step, batches=running.batches, profiled=PROFILED, **running.live
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_reason_is_named_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of all that may be said, the planted reason comes first."""
    program = PROGRAMS[name]
    found = judged(program, monkeypatch)
    named = [(each.rule, round(each.weight, 2)) for each in found.findings]
    assert named, found.profile.table().text()
    assert named[0][0] == program.rule, (named, found.profile.table().text())
    assert found.findings[0].advice


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_reason_is_named_first_on_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the same, for what costs nothing on a CPU."""
    program = ON_A_GPU[name]
    found = judged(program, monkeypatch)
    assert found.findings[0].rule == program.rule, found.findings


def test_the_reasons_are_different() -> None:
    """Law: there are eight programs, and no two are slow for one reason."""
    assert len({program.rule for program in PROGRAMS.values()}) == 8


def test_a_sound_program_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the same steps on a machine that is fast in 16 bits give no complaint."""
    sound = dataclasses.replace(PROGRAMS["emulated"], rates=FAST)
    found = judged(sound, monkeypatch)
    worse = [each for each in found.findings if each.severity != "note"]
    assert not worse, (worse, found.profile.table().text())

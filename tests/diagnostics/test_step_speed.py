"""Programs that are slow for one known reason: the doctor names it first.

What each spends its time on was recorded on a quiet machine into `slow_profiles.json`;
started as a program, this file records it again.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from slow_programs import FAST, ON_A_GPU, PROGRAMS, Program

import halfstep as hs
from halfstep.diagnostics import step_diagnosis
from halfstep.diagnostics.profiling.profile_result import Profile
from halfstep.machine import hardware

PROFILED = 12
"""Of so many steps the shortest counts: other programs disturb some of them."""


RECORDED = Path(__file__).parents[1] / "support" / "slow_profiles.json"
ENOUGH = 0.95
"""Share of the operations' time that is recorded: a few operations take it."""


def judged(
    program: Program, patch: pytest.MonkeyPatch
) -> hs.diagnostics.step_diagnosis.Diagnosis:
    """Return what the doctor finds in a program, on the machine it is meant for."""
    here = dataclasses.replace(
        hardware.capabilities(), instruction_sets=("AVX512-BF16", "AMX-BF16")
    )
    patch.setattr(hardware, "capabilities", lambda: here)
    torch.manual_seed(0)
    running = program.start()  # on rates of which no session warns
    patch.setattr(hardware, "gemm_rates", lambda *_, **__: program.rates)
    return hs.diagnose(
        running.step, batches=running.batches, profiled=PROFILED, **running.live
    )


def recorded(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let a program's steps take what was recorded, and make none."""
    found = Profile.from_data(json.loads(RECORDED.read_text(encoding="utf-8"))[name])
    patch.setattr(step_diagnosis, "profile", lambda *_, **__: found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_reason_is_named_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of all that may be said, the planted reason comes first."""
    recorded(name, monkeypatch)
    found = judged(PROGRAMS[name], monkeypatch)
    assert found.findings[0].rule == PROGRAMS[name].rule, found.findings
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


def test_kernels_are_used_in_timed_steps() -> None:
    """Law: steps are timed without hooks, with which a session has no kernel."""
    model = torch.nn.Linear(8, 8)
    session = hs.prepare(
        model, torch.optim.AdamW(model.parameters()), "O2", dtype="bf16"
    )

    def step() -> None:
        with session.autocast():
            loss = session.model(torch.ones(4, 8)).square().mean()
        session.backward(loss)
        session.step()

    assert hs.diagnose(step, session=session).profile.optimizer is None


def test_a_sound_program_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the same steps on a machine that is fast in 16 bits give no complaint."""
    recorded("emulated", monkeypatch)
    sound = dataclasses.replace(PROGRAMS["emulated"], rates=FAST)
    found = judged(sound, monkeypatch)
    worse = [each for each in found.findings if each.severity != "note"]
    assert not worse, (worse, found.profile.table().text())


def record() -> None:
    """Write down what each program spends its time on here."""
    found = {}
    for name, program in PROGRAMS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardware, "gemm_rates", lambda *_, **__: FAST)
            profile = judged(program, patch).profile
        spent, rows = 0.0, []
        for row in profile.rows:
            if spent < ENOUGH * sum(each.self_s for each in profile.rows):
                rows.append(row)
            spent += row.self_s
        found[name] = dataclasses.replace(profile, rows=tuple(rows)).data()
    lines = (f"{json.dumps(name)}: {json.dumps(told)}" for name, told in found.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    record()

"""The step of a run that is looked at: nothing changes, and it says where time went."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_training import assert_same_run, small_settings, write_letters
from torch.profiler import profile as watch

from halfstep.diagnostics.profiling import timeline
from halfstep.diagnostics.profiling.profile_result import Profile
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.train import loop
from halfstep.train.loop import is_profile_step
from halfstep.train.plan import Timers
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "is_profile_step", is_profile_step)


def settings(folder: Path, level: str, dtype: str) -> dict[str, Any]:
    more = {"level": level, "dtype": dtype, "epochs": 2, "lr": 5e-3, "seed": 3}
    return small_settings(folder, write_letters(folder, 120), **more)


@pytest.mark.parametrize(("level", "dtype"), [("O0", "auto"), ("O2", "fp16")])
def test_looking_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, dtype: str
) -> None:
    """Law: weights, checkpoints and records are those of a run without, to the bit."""
    told = settings(tmp_path, level, dtype)
    run(told | {"out": str(tmp_path / "looked")})
    monkeypatch.setattr(loop, "is_profile_step", lambda *_: False)
    run(told | {"out": str(tmp_path / "plain")})
    assert (tmp_path / "looked" / "profile.json").exists()
    assert not (tmp_path / "plain" / "profile.json").exists()
    assert_same_run(tmp_path / "looked", tmp_path / "plain")


def test_what_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Law: the file is a profile of the run's level and format, and nothing is said."""
    out = tmp_path / "run"
    run(settings(tmp_path, "O1", "bf16"))
    told = json.loads((out / "profile.json").read_text(encoding="utf-8"))
    found = Profile.from_data(told)
    assert (found.level, found.dtype, found.device) == ("O1", "bf16", "cpu")
    assert {"bf16", "fp32"} <= {word for row in found.rows for word in row.dtypes}
    assert found.gemm_s > 0
    assert found.update_s > 0
    assert min(row.self_s for row in found.rows) >= 0
    assert found.casts_s > 0
    assert Profile.from_data(told).wall_s == found.wall_s
    assert "profiler" not in capfd.readouterr().err


def test_which_step_is_due() -> None:
    """Law: one step of a run, on a CPU, and none while somebody else profiles."""
    gpu = SimpleNamespace(type="cuda")
    due = 20
    assert [n for n in range(1, 51) if is_profile_step(n, 50, CPU)] == [due]
    assert [n for n in range(1, 8) if is_profile_step(n, 7, CPU)] == [7]
    assert not is_profile_step(due, 50, gpu)  # type: ignore[arg-type]
    with watch():
        assert not is_profile_step(due, 50, CPU)


def test_a_step_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: events that cannot be read are told in a warning, and the run is as ever."""
    told = settings(tmp_path, "O1", "bf16")
    run(told | {"out": str(tmp_path / "plain")})
    unread = Mock(side_effect=RuntimeError("no such event\nat all"))
    monkeypatch.setattr(timeline, "read", unread)
    with pytest.warns(UserWarning, match="read: RuntimeError: no such event; training"):
        run(told | {"out": str(tmp_path / "unread")})
    assert not (tmp_path / "unread" / "profile.json").exists()
    (tmp_path / "plain" / "profile.json").unlink()
    assert_same_run(tmp_path / "unread", tmp_path / "plain")


def test_a_step_that_fails_is_not_hushed_up() -> None:
    """Law: an error of the step itself ends it, as it would without the profiler."""
    choice: Any = SimpleNamespace(level=levels.O1, format=formats.BF16)
    with pytest.raises(ZeroDivisionError):
        loop.run_profiled(lambda: 1 / 0, Timers(), choice)

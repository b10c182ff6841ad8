"""A run that is observed, by a probe or the profiler: nothing changes, all is told."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_training import (
    interrupt_before,
    overflow_in,
    same,
    small_settings,
    steps_of,
    timeless,
    write_letters,
)
from torch.profiler import profile as watch

from halfstep.checkpoint import single
from halfstep.diagnostics.profiling import timeline
from halfstep.diagnostics.profiling.profile_result import Profile
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.scaling import LossScaleCollapse
from halfstep.train import loop
from halfstep.train.loop import is_profile_step
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.plan import Timers
from halfstep.train.result import RunResult
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")

STEPS = 12
Runs = Callable[[str, str], RunResult]


def settings(folder: Path) -> dict[str, Any]:
    source = write_letters(folder, 106)
    more = {"level": "O2", "dtype": "bf16", "epochs": 2, "eval_every": 4}
    return small_settings(folder, source, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_runs: None) -> Runs:
    """Return what trains with an observer, or "off"; once with each."""
    del small_runs
    folder = tmp_path_factory.mktemp("observed")

    @functools.cache
    def trained(mode: str, kind: str) -> RunResult:
        own = {"out": str(folder / f"{mode} {kind}")}
        own["level"], own["dtype"] = kind.split()
        with pytest.MonkeyPatch.context() as patch:
            if mode == "profiler":
                patch.setattr(loop, "is_profile_step", is_profile_step)
            else:
                own["probe"] = mode
            return run(settings(folder) | own)

    return trained


def events(result: RunResult, kind: str) -> list[dict[str, Any]]:
    return [r for r in result.folder.records() if r.get("event") == kind]


def assert_same_steps(*results: RunResult) -> None:
    one, other = (timeless(steps_of(each.folder.records())) for each in results)
    assert len(one) == STEPS
    assert one == other
    states = [single.load(each.folder.checkpoint_path(STEPS)) for each in results]
    assert same(states[0].weights, states[1].weights)
    assert same(states[0].state, states[1].state)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *((mode, "O2 bf16") for mode in ("flags", "full")),
        ("profiler", "O1 fp16"),
    ],
)
def test_nothing_changes(runs: Runs, mode: str, kind: str) -> None:
    """Law: an observed run leaves the model and records of one that is not."""
    assert_same_steps(runs("off", kind), runs(mode, kind))


def test_statistics(runs: Runs) -> None:
    """Law: each step has statistics of outputs and of gradients, of training alone."""
    result = runs("full", "O2 bf16")
    found = events(result, "stats")
    assert [event["step"] for event in found] == list(range(1, STEPS + 1))
    names = found[0]["tensors"]
    assert {"model:output", "classifier:output", "classifier:grad"} <= names.keys()
    assert "classifier.weight:grad" in names
    # Evaluation has other batches, and more of them, and must not be counted in.
    assert found[3]["tensors"]["classifier:output"]["count"] == 16 * 2
    assert not events(result, "non_finite")


def test_a_collapse_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the step that ends a run is among the events of its probe."""
    overflow_in(monkeypatch, *range(1, 99))
    given = {"dtype": "fp16", "loss_scale": "dynamic", "probe": "flags"}
    with pytest.raises(LossScaleCollapse):
        run(settings(tmp_path) | given | {"epochs": 9, "eval_every": 99})
    records = RunFolder(tmp_path / "run").records()
    last = max(record["step"] for record in steps_of(records))  # the one before
    seen = [r["step"] for r in records if r.get("event") == "non_finite"]
    assert seen[-1] > last


def test_resumed(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a run that is cut off and resumed has the events of one that was not."""
    given = settings(tmp_path) | {"probe": "full"}
    interrupt_before(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(given)
    again = run({"out": given["out"]}, resume=True)
    both = (runs("full", "O2 bf16"), again)
    metrics = [timeless(each.folder.records()) for each in both]
    assert metrics[0] == metrics[1]


def test_a_profile(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """Law: the file is a profile of the run's level and format, and nothing is said."""
    path = runs("profiler", "O1 fp16").folder.path / "profile.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    found = Profile.from_data(told)
    assert (found.level, found.dtype, found.device) == ("O1", "fp16", "cpu")
    assert {"fp16", "fp32"} <= {word for row in found.rows for word in row.dtypes}
    assert min(found.gemm_s, found.update_s, found.casts_s) > 0
    assert min(row.self_s for row in found.rows) >= 0
    assert "profiler" not in capfd.readouterr().err
    off = runs("off", "O1 fp16").folder.path
    assert not (off / "profile.json").exists()


def test_which_step_is_profiled() -> None:
    """Law: one step of a run, on a CPU, and none while another profiler runs."""
    cpu, gpu, due = torch.device("cpu"), SimpleNamespace(type="cuda"), 20
    assert [n for n in range(1, 51) if is_profile_step(n, 50, cpu)] == [due]
    assert [n for n in range(1, 8) if is_profile_step(n, 7, cpu)] == [7]
    assert not is_profile_step(due, 50, gpu)  # type: ignore[arg-type]
    with watch():
        assert not is_profile_step(due, 50, cpu)


def test_a_profile_that_cannot_be_read(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: events that cannot be read are told in a warning, and the run is as ever."""
    monkeypatch.setattr(loop, "is_profile_step", is_profile_step)
    unread = Mock(side_effect=RuntimeError("no such event\nat all"))
    monkeypatch.setattr(timeline, "read", unread)
    with pytest.warns(UserWarning, match="read: RuntimeError: no such event; training"):
        result = run(settings(tmp_path))
    assert not (result.folder.path / "profile.json").exists()
    assert_same_steps(result, runs("off", "O2 bf16"))


def test_a_step_that_fails_is_not_hushed_up() -> None:
    """Law: an error of the step itself ends it, as it would without the profiler."""
    choice: Any = SimpleNamespace(level=levels.O1, format=formats.BF16)
    with pytest.raises(ZeroDivisionError):
        loop.run_profiled(lambda: 1 / 0, Timers(), choice)

"""A probe in a run: what it writes, and that it changes nothing."""

from pathlib import Path
from typing import Any

import pytest
from small_training import (
    interrupt_before,
    overflow_in,
    same,
    small_settings,
    steps_of,
    timeless,
    write_letters,
)

from halfstep.checkpoint import single
from halfstep.scaling import LossScaleCollapse
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.result import RunResult
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")

STEPS = 12


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    source = write_letters(tmp_path, 106)
    more = {"level": "O2", "dtype": "bf16", "epochs": 2, "eval_every": 4}
    return small_settings(tmp_path, source, **more)


def events(result: RunResult, kind: str) -> list[dict[str, Any]]:
    return [r for r in result.folder.records() if r.get("event") == kind]


@pytest.mark.parametrize("mode", ["flags", "sampled", "full"])
def test_nothing_changes(settings: dict[str, Any], tmp_path: Path, mode: str) -> None:
    """Law: a run with a probe leaves the model and records of one without."""
    bare = run(settings | {"out": str(tmp_path / "bare")})
    probed = run(settings | {"out": str(tmp_path / mode), "probe": mode})
    records = [timeless(steps_of(each.folder.records())) for each in (bare, probed)]
    assert len(records[0]) == STEPS
    assert records[0] == records[1]
    states = [
        single.load(each.folder.checkpoint_path(STEPS)) for each in (bare, probed)
    ]
    assert same(states[0].weights, states[1].weights)
    assert same(states[0].state, states[1].state)


def test_statistics(settings: dict[str, Any], tmp_path: Path) -> None:
    """Law: each step has statistics of outputs and of gradients, of training alone."""
    result = run(settings | {"out": str(tmp_path / "run"), "probe": "full"})
    found = events(result, "stats")
    assert [event["step"] for event in found] == list(range(1, STEPS + 1))
    names = found[0]["tensors"]
    assert {"model:output", "classifier:output", "classifier:grad"} <= names.keys()
    assert "classifier.weight:grad" in names
    # Evaluation has other batches, and more of them, and must not be counted in.
    assert found[3]["tensors"]["classifier:output"]["count"] == 16 * 2
    assert not events(result, "non_finite")


def test_a_collapse_is_seen(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the step that ends a run is among the events of its probe."""
    overflow_in(monkeypatch, *range(1, 99))
    given = settings | {"dtype": "fp16", "loss_scale": "dynamic", "probe": "flags"}
    given |= {"epochs": 9, "eval_every": 99, "out": str(tmp_path / "run")}
    with pytest.raises(LossScaleCollapse):
        run(given)
    records = RunFolder(tmp_path / "run").records()
    last = max(record["step"] for record in steps_of(records))  # the one before
    seen = [r["step"] for r in records if r.get("event") == "non_finite"]
    assert seen[-1] > last


def test_resumed(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a run that is cut off and resumed has the events of one that was not."""
    given = settings | {"probe": "full"}
    whole = run(given | {"out": str(tmp_path / "whole")})
    interrupt_before(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(given | {"out": str(tmp_path / "cut")})
    again = run({"out": str(tmp_path / "cut")}, resume=True)
    metrics = [timeless(each.folder.records()) for each in (whole, again)]
    assert metrics[0] == metrics[1]

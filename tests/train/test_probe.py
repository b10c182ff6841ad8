"""A probe in a run: what it writes, and that it changes nothing."""

import functools
from collections.abc import Callable
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
Runs = Callable[[str], RunResult]


def settings(folder: Path) -> dict[str, Any]:
    source = write_letters(folder, 106)
    more = {"level": "O2", "dtype": "bf16", "epochs": 2, "eval_every": 4}
    return small_settings(folder, source, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_runs: None) -> Runs:
    """Return what trains with a probe, or "off"; once with each."""
    del small_runs
    folder = tmp_path_factory.mktemp("probed")

    @functools.cache
    def trained(mode: str) -> RunResult:
        return run(settings(folder) | {"out": str(folder / mode), "probe": mode})

    return trained


def events(result: RunResult, kind: str) -> list[dict[str, Any]]:
    return [r for r in result.folder.records() if r.get("event") == kind]


@pytest.mark.parametrize("mode", ["flags", "sampled", "full"])
def test_nothing_changes(runs: Runs, mode: str) -> None:
    """Law: a run with a probe leaves the model and records of one without."""
    both = [runs("off"), runs(mode)]
    records = [timeless(steps_of(each.folder.records())) for each in both]
    assert len(records[0]) == STEPS
    assert records[0] == records[1]
    states = [single.load(each.folder.checkpoint_path(STEPS)) for each in both]
    assert same(states[0].weights, states[1].weights)
    assert same(states[0].state, states[1].state)


def test_statistics(runs: Runs) -> None:
    """Law: each step has statistics of outputs and of gradients, of training alone."""
    result = runs("full")
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
    metrics = [timeless(each.folder.records()) for each in (runs("full"), again)]
    assert metrics[0] == metrics[1]

"""`--compare-fp32`: the first steps of a run, in fp32 and at its level."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from small_training import same, small_settings, steps_of, write_letters

from halfstep.train import fp32_comparison
from halfstep.train import run as run_module
from halfstep.train.fp32_comparison import compare_with_fp32
from halfstep.train.result import RunResult
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")
LOW = {"level": "O2", "dtype": "bf16"}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return small_settings(tmp_path, write_letters(tmp_path, 100), lr=5e-3, epochs=2)


def loss(result: RunResult, step: int) -> Any:
    return steps_of(result.folder.records())[step - 1]["loss"]


def weights(result: RunResult) -> dict[str, Any]:
    return load_file(result.folder.path / "model" / "model.safetensors")


def note_of(result: RunResult) -> str:
    """Return why nothing was compared, as the table and the summary say."""
    (table,) = (t for t in result.tables if t.title == "Against fp32")
    note: str = result.summary["fp32"]["note"]
    assert result.summary["fp32"] == {"note": note}
    assert table.rows == ((note,),)
    return note


def test_steps_are_those_of_runs(settings: dict[str, Any]) -> None:
    """Law: to the bit the losses of runs at O0 and at the level; weights unaffected."""
    more: dict[str, Any] = {"accumulate": 2, "master_weights": "split"}
    result = run(settings | LOW | more | {"compare_fp32": 4})
    final = weights(result)
    facts = result.summary["fp32"]
    assert facts["steps"] == 4
    assert facts["loss"]["level"] == loss(result, 7)  # after three not timed
    assert facts["bytes"]["level"] < facts["bytes"]["fp32"]
    assert all(value > 0 for value in (*facts["ms"].values(), facts["time_ratio"]))
    (table,) = (t for t in result.tables if t.title == "Against fp32")
    assert [row[0] for row in table.rows] == ["fp32", "O2 bf16"]
    assert same(weights(run(settings | LOW | more, overwrite=True)), final)
    fp32 = run(settings | {"accumulate": 2, "level": "O0"}, overwrite=True)
    assert facts["loss"]["fp32"] == loss(fp32, 7)


FP16 = {"level": "O1", "dtype": "fp16", "loss_scale": "1e30"}
FEW = "too few steps to compare: {} steps, {} skipped, the first 3 not timed"


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"level": "O0"}, "the run is in fp32 itself"),
        (LOW | {"max_steps": 4}, FEW.format(4, 0)),
        # A pair with a step without update counts as skipped.
        (FP16 | {"max_steps": 6}, FEW.format(6, 6)),
    ],
)
def test_nothing_to_compare(settings: dict[str, Any], more: Any, note: str) -> None:
    """Law: the table says why."""
    assert note_of(run(settings | more | {"compare_fp32": 3})) == note


@pytest.mark.parametrize("to_build", [False, True])
def test_a_failure_costs_no_model(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, to_build: bool
) -> None:
    """Law: where memory is short for more models, the run is whole, and says so."""
    fail = Mock(side_effect=torch.OutOfMemoryError("3 GiB of memory\nhere and there"))

    def measured(_: object, *rest: Any) -> dict[str, Any]:
        return compare_with_fp32(fail, *rest)

    if to_build:
        monkeypatch.setattr(run_module, "compare_with_fp32", measured)
    else:
        monkeypatch.setattr(fp32_comparison, "SavedBytes", fail)
    result = run(settings | LOW | {"compare_fp32": 2})
    assert note_of(result) == "OutOfMemoryError: 3 GiB of memory"
    assert weights(result)
    assert (result.folder.path / "summary.json").exists()


def test_the_report_comes_first(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a comparison that is interrupted costs neither summary nor report."""
    monkeypatch.setattr(
        run_module, "compare_with_fp32", Mock(side_effect=KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run(settings | LOW | {"compare_fp32": 2})
    left = {path.name for path in Path(settings["out"]).iterdir()}
    assert {"model", "summary.json", "report.html"} <= left


def test_a_shorter_run(settings: dict[str, Any]) -> None:
    """Law: no more steps than the run has."""
    result = run(settings | LOW | {"max_steps": 6, "compare_fp32": 100})
    assert result.summary["fp32"]["steps"] == 3

"""--check: what a run would be, told after a few steps, and nothing written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from data_files import tree
from small_training import small_settings, write_letters

from halfstep import cli
from halfstep.errors import UserError
from halfstep.train import dry_run
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a run of 18 steps."""
    source = write_letters(tmp_path, 100)
    return small_settings(tmp_path, source, level="O2", dtype="bf16", epochs=3)


def test_it_writes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """Law: a rehearsal makes no folder, and says the steps of the whole run."""
    before = tree(tmp_path)
    result = run(settings, check=True)
    assert tree(tmp_path) == before
    assert result.summary["steps"] == 18  # 3 x 90 / 16
    assert result.summary["skipped"] == 0
    assert result.summary["step_seconds"] > 0
    titles = [table.title for table in result.tables]
    assert titles[:2] == ["Estimate of this run", "Check before training"]
    assert "Gradients against fp32, by module" in titles
    assert "Time and memory" in titles


def test_it_checks_what_it_would_train(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Law: the check is of the run's level and format, recomputed and frozen too."""
    before = tree(tmp_path)
    frozen = settings | {"freeze": "bert.embeddings", "recompute": True}
    result = run(frozen | {"level": "O1", "dtype": "fp16"}, check=True)
    assert tree(tmp_path) == before
    told = {table.title: table.text() for table in result.tables}
    assert "O1 fp16" in told["Check before training"]
    assert "largest safe loss scale" in told["Check before training"]
    gradients = told["Gradients against fp32, by module"]
    assert "bert.encoder.layer.0" in gradients
    assert "bert.embeddings" not in gradients
    assert "1.00000" in gradients or "0.999" in gradients


def test_it_leaves_a_run_alone(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a run in --out stays to the byte, and is spoken of."""
    run(settings)
    before = tree(tmp_path)
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in settings.items()
        if name != "dev_share"
    ]
    capsys.readouterr()
    assert cli.run(["train", "--check", *words]) == 0
    shown = capsys.readouterr().out
    assert tree(tmp_path) == before
    assert "holds a run already" in " ".join(shown.split())
    assert "Estimate of this run" in shown
    assert "report:" not in shown


@pytest.mark.parametrize(("longest", "made"), [(0.0, 1), (math.inf, 8)])
def test_steps_that_take_long(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    longest: float,
    made: int,
) -> None:
    """Law: where steps take long there are fewer, and the table says so."""
    monkeypatch.setattr(dry_run, "_MAX_SECONDS", longest)
    table = run(settings, check=True).tables[0]
    assert f"0 of {made} skipped" in table.text()
    cut = "Only 1 of 8 steps were run: they are slow." in table.notes
    assert cut is (made == 1)


def test_texts_that_leak(settings: dict[str, Any], tmp_path: Path) -> None:
    """Law: texts that train and dev share are told before a run, not only after."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = json.loads(Path(settings["data"]).read_text())
    for name in ("train", "dev"):
        (folder / f"{name}.json").write_text(json.dumps(rows))
    del settings["dev_share"]
    table = run(settings | {"data": str(folder)}, check=True).tables[0]
    (told,) = [note for note in table.notes if note.startswith("dev texts: ")]
    assert "100 of 100 texts, 100%, are in train too" in told


def test_a_disk_without_room(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the checkpoints would not fit, the user is told so, and what to do."""
    monkeypatch.setattr(dry_run, "_free_bytes", lambda _: 1000)
    with pytest.raises(UserError) as caught:
        run(settings, check=True)
    assert str(caught.value).endswith("Free some, or lower --keep.")
    assert not (tmp_path / "run").exists()

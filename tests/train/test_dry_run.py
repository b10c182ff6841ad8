"""--check: what a run would be, told after a few steps, and nothing written."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from data_files import tree
from small_training import small_settings, write_letters

from halfstep.errors import UserError
from halfstep.train import dry_run
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    source = write_letters(tmp_path, 100)
    return small_settings(tmp_path, source, level="O2", dtype="bf16", epochs=3)


OTHER = {"level": "O1", "dtype": "fp16", "freeze": "bert.embeddings", "recompute": True}


@pytest.mark.parametrize("more", [{}, OTHER], ids=["O2 bf16", "O1 fp16"])
def test_it_writes_nothing(
    settings: dict[str, Any], tmp_path: Path, more: dict[str, Any]
) -> None:
    """Law: a dry run writes nothing; it checks the run's own level, and its steps."""
    before = tree(tmp_path)
    result = run(settings | more, check=True)
    assert tree(tmp_path) == before
    assert result.summary["steps"] == 18  # 3 x 90 / 16
    assert result.summary["skipped"] == 0
    assert result.summary["step_seconds"] > 0
    told = {table.title: table.text() for table in result.tables}
    assert list(told)[:2] == ["Estimate of this run", "Check before training"]
    assert "Time and memory" in told
    assert ("O1 fp16" in told["Check before training"]) == bool(more)
    assert ("largest safe loss scale" in told["Check before training"]) == bool(more)
    gradients = told["Gradients against fp32, by module"]
    assert "bert.encoder.layer.0" in gradients
    assert ("bert.embeddings" in gradients) != bool(more)
    assert "1.00000" in gradients or "0.999" in gradients


def test_it_leaves_a_run_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    """Law: a run in --out stays to the byte, and is spoken of."""
    run(settings)
    before = tree(tmp_path)
    (first, *_) = run(settings, check=True).tables
    assert tree(tmp_path) == before
    assert any("holds a run already" in note for note in first.notes)


def test_steps_that_take_long(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where steps take long there are fewer, and the table says so."""
    for longest, made in ((0.0, 1), (math.inf, 8)):
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
    assert any("100 of 100 dev texts are in train too" in n for n in table.notes)


def test_a_disk_without_room(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the checkpoints would not fit, the user is told so, and what to do."""
    monkeypatch.setattr(dry_run, "_free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match=r"Free some, or lower --keep\.$"):
        run(settings, check=True)
    assert not Path(settings["out"]).exists()

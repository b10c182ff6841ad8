"""What --resume refuses: one line, and the run left as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from data_files import tree

from halfstep import cli
from halfstep.checkpoint import atomic_directory, single
from halfstep.train import checkpointing, model
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.run import run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [["ab" * (1 + number % 4), number % 2] for number in range(40)]
    (folder / "letters.json").write_text(json.dumps(rows), encoding="utf-8")
    settings = {
        "data": str(folder / "letters.json"),
        "model": "mini",
        "level": "O2",
        "dtype": "bf16",
        "epochs": 1,
        "batch_size": 8,
        "out": str(folder / "run"),
    }
    run(settings)
    return folder / "run"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may spoil."""
    return shutil.copytree(finished, tmp_path / "run")


def last(run_folder: Path) -> Path:
    """Return the only checkpoint of the run."""
    folder = RunFolder(run_folder)
    (step,) = folder.steps()
    return folder.checkpoint_path(step)


def cut(path: Path) -> None:
    """Cut the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut weights": ("weights.safetensors", cut, "is truncated or altered: "),
    "bit in state": ("state.pt", flip, "is damaged: its SHA-256 is not "),
    "no manifest": ("manifest.json", Path.unlink, "it has no manifest.json."),
}


def refused(place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Resume; return the one line that refuses to, all files left alone."""
    before = tree(place)
    capsys.readouterr()
    assert cli.run(["train", "--resume", "--out", str(place)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert tree(place) == before
    start = "halfstep: error: "
    assert err.startswith(start)
    assert err.count("\n") == 1
    return err.removeprefix(start)[:-1]


OTHER_DATA = (
    "--resume: the checkpoint was made from other data; resume with the data it was "
    "trained on."
)


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints(
    copy: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Law: without a whole checkpoint nothing is gone on with, nor touched."""
    file, damage, fault = DAMAGE[name]
    damage(last(copy) / file)
    line = refused(copy, capsys)
    checkpoints = copy / "checkpoints"
    assert line.startswith(f"no checkpoint in {checkpoints} can be used (step-")
    assert fault in line
    assert str(copy) in line


def test_foreign_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a sound checkpoint of something else is refused."""
    notes = atomic_directory.read(last(copy))["notes"]
    foreign = {"w": torch.ones(2)}, {"epoch": 3}, notes | {"fingerprint": "other"}
    single.save(last(copy), *foreign, replace=True)
    assert refused(copy, capsys) == OTHER_DATA


MISSING = object()
NOTES: dict[str, Any] = {
    "step": "4",
    "best_step": None,
    "waited": 1.5,
    "processes": True,
    "best_score": "high",
    "level": 2,
    "dtype": ["bf16"],
    "reason": None,
    "fingerprint": 0,
}


@pytest.mark.parametrize("value", ["missing", "another"])
@pytest.mark.parametrize("name", NOTES)
def test_notes_of_another(copy: Path, name: str, value: str) -> None:
    """Law: notes without what a run reads are refused, by their file and field."""
    rewrite(last(copy), name, NOTES[name] if value == "another" else MISSING)
    with pytest.raises(single.CheckpointError) as caught:
        checkpointing.checked_notes(last(copy))
    assert str(caught.value) == (
        f"checkpoint file {last(copy) / 'manifest.json'} was not written by a run: "
        f"{name!r} of its notes is missing, or not what a run notes there."
    )


def rewrite(path: Path, name: str, value: object) -> None:
    """Change a note of a checkpoint, and seal it, as whoever knows the format can."""
    manifest = atomic_directory.read(path)
    manifest["notes"][name] = value
    if value is MISSING:
        del manifest["notes"][name]
    manifest["seal"] = atomic_directory.seal(manifest)
    (path / atomic_directory.MANIFEST).write_text(
        json.dumps(manifest), encoding="utf-8"
    )


def test_notes_before_a_score(copy: Path) -> None:
    """Law: notes as a run writes them before its first evaluation are taken."""
    rewrite(last(copy), "best_score", None)
    notes = checkpointing.checked_notes(last(copy))
    assert checkpointing.train_state_from_notes(notes).best_score is None


def test_another_model(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a checkpoint does not fit a model of another shape."""
    monkeypatch.setitem(model.SIZES["mini"], "intermediate_size", 96)
    line = refused(copy, capsys)
    assert "the state holds shape (" in line
    assert line.endswith("; build the model that was saved.")


@pytest.mark.parametrize("change", ["text", "label", "order", "names"])
def test_other_data(
    copy: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """Law: data that changed in any way since the checkpoint is refused."""
    config = copy / "config.json"
    saved = json.loads(config.read_text())
    rows: list[list[Any]] = json.loads(Path(saved["data"]).read_text())
    if change == "text":
        rows[7][0] += "a"
    elif change == "label":
        rows[7][1] = 1 - rows[7][1]
    elif change == "order":
        rows[6], rows[7] = rows[7], rows[6]
    else:
        rows = [[written, ("no", "yes")[label]] for written, label in rows]
    other = copy / "letters.json"
    other.write_text(json.dumps(rows))
    config.write_text(json.dumps(saved | {"data": str(other)}))
    assert refused(copy, capsys) == OTHER_DATA


def test_the_copy_is_sound(copy: Path) -> None:
    """Law: nothing but the damage makes the others fail."""
    assert cli.run(["train", "--resume", "--out", str(copy)]) == 0

"""What --resume refuses: one line, and the run left as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from data_files import refused_command, tree
from small_training import small_settings

from halfstep.checkpoint import atomic_directory, single
from halfstep.train import checkpointing, model
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    rows = [["ab" * (1 + number % 4), number % 2] for number in range(40)]
    (folder / "letters.json").write_text(json.dumps(rows), encoding="utf-8")
    more = {"level": "O2", "dtype": "bf16", "epochs": 1, "batch_size": 8}
    return run(small_settings(folder, folder / "letters.json", **more)).folder.path


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def last(run_folder: Path) -> Path:
    folder = RunFolder(run_folder)
    (step,) = folder.steps()
    return folder.checkpoint_path(step)


def refused(place: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    before = tree(place)
    words = ("train", "--resume", "--out", str(place), *more)
    line = refused_command(capsys, *words, most=60)
    assert tree(place) == before
    return line


def test_a_damaged_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: without a whole checkpoint nothing is gone on with, nor touched."""
    weights = last(copy) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    line = refused(copy, capsys)
    checkpoints = copy / "checkpoints"
    assert line.startswith(f"no checkpoint in {checkpoints} can be used (step-")
    assert f"{weights} is truncated or altered: " in line


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


@pytest.mark.parametrize("name", NOTES)
def test_notes_of_another(copy: Path, name: str) -> None:
    """Law: notes without what a run reads are refused, by their file and field."""
    rewrite(last(copy), name, MISSING if name == "level" else NOTES[name])
    with pytest.raises(single.CheckpointError) as caught:
        checkpointing.checked_notes(last(copy))
    assert str(caught.value).startswith(
        f"checkpoint file {last(copy) / 'manifest.json'} was not written by a run: "
        f"{name!r} of its notes is missing"
    )


def rewrite(path: Path, name: str, value: object) -> None:
    manifest = atomic_directory.read(path)
    manifest["notes"][name] = value
    if value is MISSING:
        del manifest["notes"][name]
    manifest["seal"] = atomic_directory.seal(manifest)
    (path / atomic_directory.MANIFEST).write_text(json.dumps(manifest))


def test_notes_before_a_score(copy: Path) -> None:
    """Law: notes as a run writes them before its first evaluation are taken."""
    rewrite(last(copy), "best_score", None)
    assert checkpointing.checked_notes(last(copy))["best_score"] is None


def test_another_model(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a checkpoint does not fit a model of another shape."""
    monkeypatch.setitem(model.SIZES["mini"], "intermediate_size", 96)
    line = refused(copy, capsys)
    assert "the state holds torch.float32 (" in line
    assert line.endswith("; build model and optimizer as they were saved.")


def test_other_data(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: data that changed since the checkpoint is refused."""
    saved = json.loads((copy / "config.json").read_text())
    rows: list[list[Any]] = json.loads(Path(saved["data"]).read_text())
    rows[7][0] += "a"
    other = copy / "letters.json"
    other.write_text(json.dumps(rows))
    assert refused(copy, capsys, "--data", str(other)) == (
        "--resume: the checkpoint was made from other data; resume with the data it "
        "was trained on."
    )

"""The folder of a run: what may be written, what a crash leaves, what stays."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from halfstep import checkpoint
from halfstep.errors import UserError
from halfstep.train import launch
from halfstep.train.config import TrainConfig
from halfstep.train.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILES = ("metrics.jsonl", "summary.json", "report.html", "config.json")
FOLDERS = ("checkpoints", "model", "tensorboard")
NO_SPACE = OSError(28, "No space left on device")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a folder in which a run has begun."""
    found = RunFolder(tmp_path / "run")
    found.begin({"seed": 1}, overwrite=False)
    return found


def save(folder: RunFolder, step: int, **notes: int) -> None:
    """Save a checkpoint that tells its step."""
    number = torch.tensor(float(step))
    folder.save(step, {"w": number}, {"step": step}, {"step": step} | notes)


def tree(root: Path) -> dict[str, bytes | None]:
    """Return the name of everything below a folder, and the bytes of files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def names(folder: RunFolder) -> set[str]:
    """Return what is where checkpoints are, hidden rests included."""
    return {each.name for each in (folder.path / "checkpoints").iterdir()}


def called(steps: Iterable[int]) -> set[str]:
    """Return the names of the checkpoints of some steps."""
    return {f"step-{step:08d}" for step in steps}


# Beginning


def test_begin(tmp_path: Path) -> None:
    """Law: a run begins with settings, its launch and a place for checkpoints."""
    folder = RunFolder(tmp_path / "a" / "b")
    folder.begin({"seed": 3, "data": None}, overwrite=False)
    assert tree(folder.path).keys() == {"config.json", "launch.json", "checkpoints"}
    assert folder.settings() == {"seed": 3, "data": None}
    assert launch.read(folder.path / "launch.json") == launch.identity()
    assert folder.records() == []
    assert folder.steps() == []
    assert not folder.has_checkpoint()


@pytest.mark.parametrize("name", [*FILES, "launch.json", "resolved.toml", *FOLDERS])
def test_a_run_is_not_written_over(tmp_path: Path, name: str) -> None:
    """Law: any trace of a run refuses another; nothing is changed."""
    held = tmp_path / name
    (held if "." in name else held / "something").mkdir(parents=True)
    before = tree(tmp_path)
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path).begin({}, overwrite=False)
    assert str(caught.value) == (
        f"{tmp_path} already holds a run ({name}); add --resume to go on with it, "
        "--overwrite to replace it, or choose another --out."
    )
    assert tree(tmp_path) == before


def test_what_is_bare_is_no_run(tmp_path: Path) -> None:
    """Law: empty folders and the identity of a launch stand in no run's way."""
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    (tmp_path / "launch.json").write_text('{"run_id": null, "agent": "elsewhere 1"}')
    folder = RunFolder(tmp_path)
    folder.begin({"seed": 1}, overwrite=False)
    assert tree(tmp_path).keys() == {"config.json", "launch.json", "checkpoints"}
    assert launch.read(tmp_path / "launch.json") == launch.identity()


def test_overwrite(folder: RunFolder) -> None:
    """Law: --overwrite removes the run and leaves everything that is not its own."""
    root = folder.path
    save(folder, 1)
    (root / "model").mkdir()
    (root / ".model.part").mkdir()
    for name in (*FILES, "model/config.json", "notes.txt", ".hidden"):
        (root / name).write_text("old")
    (root / "config.json").write_text(json.dumps(asdict(TrainConfig())))
    (root / "plots").mkdir()
    (root / "plots" / "metrics.jsonl").write_text("old")
    folder.begin({"seed": 2}, overwrite=True)
    assert tree(root) == {
        "config.json": b'{\n "seed": 2\n}',
        "launch.json": json.dumps(launch.identity()).encode(),
        "checkpoints": None,
        "notes.txt": b"old",
        ".hidden": b"old",
        "plots": None,
        "plots/metrics.jsonl": b"old",
    }


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"model": 1, "level": 1}'])
def test_overwrite_of_what_is_no_run(tmp_path: Path, config: str | None) -> None:
    """Law: --overwrite removes nothing that no run of halfstep has written."""
    (tmp_path / "metrics.jsonl").write_text("precious")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = tree(tmp_path)
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path).begin({}, overwrite=True)
    assert str(caught.value) == (
        f"--overwrite: {tmp_path} holds files of these names that are not a halfstep "
        "run's; choose another --out."
    )
    assert tree(tmp_path) == before


def test_no_folder_to_write(tmp_path: Path) -> None:
    """Law: a place below a file, or a file itself, is refused with the reason."""
    (tmp_path / "file").write_text("x")
    for place, reason in (("file/run", "Not a directory"), ("file", "File exists")):
        with pytest.raises(UserError) as caught:
            RunFolder(tmp_path / place).begin({}, overwrite=True)
        assert str(caught.value) == (
            f"--out {tmp_path / place} cannot be written: {reason}; choose another "
            "folder."
        )
    assert tree(tmp_path) == {"file": b"x"}


# Settings


def test_no_settings(tmp_path: Path) -> None:
    """Law: resuming where there is no run, or a damaged one, says which file."""
    (tmp_path / "file").write_text("x")
    for place in ("nothing", "file"):
        with pytest.raises(UserError) as caught:
            RunFolder(tmp_path / place).settings()
        assert str(caught.value) == (
            f"--resume: {tmp_path / place} holds no run; it has no config.json."
        )
    config = tmp_path / "config.json"
    for text, fault in (("{", "it is not valid JSON"), ("[]", "it holds no settings")):
        config.write_text(text)
        with pytest.raises(UserError) as caught:
            RunFolder(tmp_path).settings()
        assert str(caught.value) == f"--resume: {config} is damaged: {fault}."


def test_settings_are_text(folder: RunFolder) -> None:
    """Law: config.json is JSON that a person can read, a setting a line."""
    text = (folder.path / "config.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"seed": 1}
    assert len(text.splitlines()) == 3


# Going back


def test_rewind_sets_checkpoints_aside(folder: RunFolder) -> None:
    """Law: later checkpoints no longer count; of two damaged ones the last is kept."""
    for content in (3, 33):
        for step in (1, 2):
            save(folder, step)
        save(folder, 3, turn=content)
        folder.rewind(1)
        assert folder.steps() == [1]
        aside = {f"damaged-{name}" for name in called([2, 3])}
        assert names(folder) == called([1]) | aside
        last = folder.path / "checkpoints" / "damaged-step-00000003"
        assert checkpoint.load(last).notes == {"step": 3, "turn": content}


def test_rewind_sweeps(folder: RunFolder) -> None:
    """Law: what processes left that were killed while they wrote is removed."""
    save(folder, 1)
    for name in (".step-00000002.part-1073741824", ".step-00000001.old-1073741824", ".a.gone-7"):
        (folder.path / "checkpoints" / name).mkdir()
    (folder.path / ".model.part").mkdir()
    folder.rewind(1)
    assert names(folder) == called([1])
    assert not (folder.path / ".model.part").exists()


# Checkpoints


def test_steps(folder: RunFolder) -> None:
    """Law: the newest comes first by number, whole or not; other names do not count."""
    for name in ("step-1", "astep-00000001", "step-00000001x", "damaged-step-00000004"):
        (folder.path / "checkpoints" / name).mkdir()
    for step in (9, 123456789, 10):
        folder.checkpoint_path(step).mkdir()
    assert folder.steps() == [123456789, 10, 9]
    assert folder.has_checkpoint()
    assert RunFolder(folder.path / "nowhere").steps() == []


def test_save_replaces(folder: RunFolder) -> None:
    """Law: a step saved again is the later one, alone; a half-written rest is gone."""
    part = folder.path / "checkpoints" / ".step-00000002.part-1073741824"
    part.mkdir()
    for turn in (1, 2):
        save(folder, 2, turn=turn)
        assert names(folder) == called([2])
        loaded = checkpoint.load(folder.checkpoint_path(2))
        assert (loaded.state, loaded.notes) == ({"step": 2}, {"step": 2, "turn": turn})
        assert torch.equal(loaded.weights["w"], torch.tensor(2.0))


def test_a_crash_while_writing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: an error in mid-checkpoint leaves the one before, whole, and says so."""

    def full(*_: object) -> None:
        raise NO_SPACE

    last = "No checkpoint is whole; mend that, then start anew."
    for step in (1, 2):
        before = tree(folder.path)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            with pytest.raises(UserError) as caught:
                save(folder, step)
        assert str(caught.value) == (
            f"{folder.checkpoint_path(step)} could not be written: No space left on "
            f"device. {last}"
        )
        assert tree(folder.path) == before
        save(folder, step)
        last = (
            f"The checkpoint of step {step} is whole; mend that, then go on with "
            "--resume."
        )


def test_newest(folder: RunFolder) -> None:
    """Law: the newest is loaded; one that is damaged is named, the one before used."""
    assert folder.newest(checkpoint.load) is None
    for step in (1, 2, 10):
        save(folder, step)
    found = folder.newest(checkpoint.load)
    assert found is not None
    assert (found[0].state, found[1]) == ({"step": 10}, [])
    state = folder.checkpoint_path(10) / "state.pt"
    state.write_bytes(b"")
    found = folder.newest(checkpoint.load)
    assert found is not None
    assert found[0].state == {"step": 2}
    assert len(found[1]) == 1
    assert found[1][0].startswith(
        f"the checkpoint of step 10 is not used: checkpoint file {state} is truncated"
    )


def test_newest_after_a_killed_replacement(folder: RunFolder) -> None:
    """Law: a checkpoint that was moved to be replaced has its name again."""
    save(folder, 1)
    path = folder.checkpoint_path(1)
    path.rename(path.with_name(f".{path.name}.old-1073741824"))
    found = folder.newest(checkpoint.load)
    assert found is not None
    assert (found[0].state, found[1]) == ({"step": 1}, [])
    assert names(folder) == called([1])


def test_checkpoints_that_are_lost(folder: RunFolder) -> None:
    """Law: metrics of two evaluations and no checkpoint: the run is not begun anew."""
    folder.log({"step": 1, "event": "eval"})
    assert folder.newest(checkpoint.load) is None
    folder.log({"step": 2, "event": "eval"})
    with pytest.raises(UserError) as caught:
        folder.newest(checkpoint.load)
    assert str(caught.value) == (
        f"{folder.path / 'checkpoints'} has lost its checkpoints: metrics.jsonl tells "
        "of 2 evaluations. Restore them, or start anew with another --out."
    )


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [(1, 2, {2, 5}), (2, 1, {1, 4, 5}), (1, 5, {5}), (9, 1, {1, 2, 3, 4, 5})],
)
def test_prune(folder: RunFolder, keep: int, best: int, kept: set[int]) -> None:
    """Law: the newest stay, and the best that they name, and no others."""
    for step in (1, 2, 3, 4, 5):
        save(folder, step, best_step=min(step, best))
    folder.prune(keep)
    assert names(folder) == called(kept)
    for step in kept:
        assert checkpoint.load(folder.checkpoint_path(step)).state == {"step": step}


def test_prune_and_damage(folder: RunFolder) -> None:
    """Law: one whose manifest cannot be read is neither counted nor deleted."""
    for step in (1, 2, 3):
        save(folder, step)
    (folder.checkpoint_path(3) / "manifest.json").write_text("{")
    folder.prune(1)
    assert names(folder) == called([2, 3])
    with pytest.raises(UserError, match="keep"):
        folder.prune(0)


# The model


def test_publish_model(folder: RunFolder) -> None:
    """Law: the model appears whole; a failure leaves the one from before."""

    def writer(name: str, text: str) -> Any:
        def save_pretrained(place: Path) -> None:
            place.mkdir(exist_ok=True)
            (place / name).write_text(text)

        return SimpleNamespace(save_pretrained=save_pretrained)

    def broken(_: Path) -> None:
        raise NO_SPACE

    folder.publish_model(writer("weights", "old"), writer("vocabulary", "old"))
    assert tree(folder.model) == {"weights": b"old", "vocabulary": b"old"}
    with pytest.raises(UserError) as caught:
        folder.publish_model(
            writer("weights", "new"), SimpleNamespace(save_pretrained=broken)
        )
    assert str(caught.value) == (
        f"{folder.model} could not be written: No space left on device. No checkpoint "
        "is whole; mend that, then start anew."
    )
    assert tree(folder.model) == {"weights": b"old", "vocabulary": b"old"}
    assert not (folder.path / ".model.part").exists()
    (folder.path / ".model.part").mkdir()
    (folder.path / ".model.part" / "rest").write_text("of a killed process")
    folder.publish_model(writer("weights", "new"), writer("words", "new"))
    assert tree(folder.model) == {"weights": b"new", "words": b"new"}
    assert not (folder.path / ".model.part").exists()


def test_write(folder: RunFolder) -> None:
    """Law: a file is written in one piece; where it cannot be, the reason is told."""
    folder.write("summary.json", "{}")
    assert (folder.path / "summary.json").read_text() == "{}"
    path = folder.path / "report.html"
    path.mkdir()
    with pytest.raises(UserError) as caught:
        folder.write("report.html", "x")
    assert str(caught.value) == (
        f"{path} could not be written: Is a directory. No checkpoint is whole; mend "
        "that, then start anew."
    )

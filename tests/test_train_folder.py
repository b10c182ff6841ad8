"""The folder of a run: what may be written, what a crash leaves, what stays."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from halfstep import checkpoint
from halfstep.checkpoint import CheckpointError
from halfstep.errors import UserError
from halfstep.train.config import TrainConfig
from halfstep.train.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

OWN = ("config.json", "metrics.jsonl", "summary.json", "report.html")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a folder in which a run has begun."""
    found = RunFolder(tmp_path / "run")
    found.begin({"seed": 1}, overwrite=False)
    return found


def save(folder: RunFolder, step: int, *, best: bool = False) -> None:
    """Save a checkpoint that tells its step."""
    number = torch.tensor(float(step))
    folder.save(step, {"w": number}, {"step": step}, {"step": step}, best=best)


def steps(folder: RunFolder) -> list[int]:
    """Return the steps of the checkpoints that are there, hidden rests included."""
    names = [each.name for each in (folder.path / "checkpoints").iterdir()]
    return sorted(
        int(name.removeprefix("step-")) for name in names if not name.endswith(".json")
    )


def tree(root: Path) -> dict[str, bytes | None]:
    """Return the name of everything below a folder, and the bytes of files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def test_begin(tmp_path: Path) -> None:
    """Law: a run begins with its settings and a place for checkpoints, parents made."""
    folder = RunFolder(tmp_path / "a" / "b")
    folder.begin({"seed": 3, "data": None}, overwrite=False)
    assert tree(folder.path).keys() == {"config.json", "checkpoints"}
    assert folder.settings() == {"seed": 3, "data": None}
    assert folder.records() == []
    assert not folder.has_checkpoint()


@pytest.mark.parametrize("name", [*OWN, "checkpoints", "model"])
def test_a_run_is_not_written_over(tmp_path: Path, name: str) -> None:
    """Law: any trace of a run refuses another; nothing is changed."""
    held = tmp_path / name
    held.write_text("x") if "." in name else held.mkdir()
    before = tree(tmp_path)
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path).begin({}, overwrite=False)
    assert str(caught.value) == (
        f"{tmp_path} already holds a run ({name}); add --resume to go on with it, "
        "--overwrite to replace it, or choose another --out."
    )
    assert tree(tmp_path) == before


def test_overwrite(folder: RunFolder) -> None:
    """Law: --overwrite removes the run and leaves everything that is not its own."""
    root = folder.path
    save(folder, 1, best=True)
    (root / "model").mkdir()
    for name in (*OWN, "model/config.json", "notes.txt", ".hidden"):
        (root / name).write_text("old")
    (root / "config.json").write_text(json.dumps(asdict(TrainConfig())))
    (root / "plots").mkdir()
    (root / "plots" / "metrics.jsonl").write_text("old")
    folder.begin({"seed": 2}, overwrite=True)
    assert tree(root) == {
        "config.json": b'{\n "seed": 2\n}',
        "checkpoints": None,
        "notes.txt": b"old",
        ".hidden": b"old",
        "plots": None,
        "plots/metrics.jsonl": b"old",
    }


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


def test_metrics_round_trip(folder: RunFolder) -> None:
    """Law: records come back to the last bit; JSON has no inf and no NaN, but null."""
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 0.1 + 0.2, "names": ["a.b", "\u2028"]},
        {"step": 2, "loss": float("inf"), "grad_norm": None},
    ]
    for record in records:
        folder.log(record)
    records[1]["loss"] = None
    assert folder.records() == records
    folder.log({"step": 3, "loss": float("nan")})
    assert folder.records()[2] == {"step": 3, "loss": None}
    before = folder.metrics.read_bytes()
    folder.rewind(3)
    assert folder.metrics.read_bytes() == before


@pytest.mark.parametrize("torn", ['{"st', '{"step": 3, "loss": 1.5', "\0\0\0\0", "{"])
def test_a_torn_line(folder: RunFolder, torn: str) -> None:
    """Law: a line that a crash cut is left out, and rewinding removes it."""
    for step in (1, 2):
        folder.log({"step": step})
    with folder.metrics.open("a") as file:
        file.write(torn)
    assert folder.records() == [{"step": 1}, {"step": 2}]
    folder.rewind(2)
    folder.log({"step": 3})
    assert folder.records() == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_rewind(folder: RunFolder) -> None:
    """Law: what comes after the checkpoint's step is dropped, evaluations too."""
    for step in (1, 2, 3, 4):
        folder.log({"step": step})
        if step % 2 == 0:
            folder.log({"step": step, "event": "eval"})
    folder.rewind(2)
    kept = [{"step": 1}, {"step": 2}, {"step": 2, "event": "eval"}]
    assert folder.records() == kept
    folder.rewind(0)
    assert folder.records() == []
    assert folder.metrics.exists()


def test_rewind_before_the_first_line(folder: RunFolder) -> None:
    """Law: a run that was stopped before its first step rewinds to nothing."""
    folder.rewind(0)
    assert folder.metrics.read_bytes() == b""


def test_save_keeps_last_and_best(folder: RunFolder) -> None:
    """Law: the newest and the best checkpoint stay, and no others."""
    expected = {1: [1], 2: [1, 2], 3: [1, 3], 4: [4], 5: [4, 5], 6: [4, 6]}
    for step, kept in expected.items():
        save(folder, step, best=step in {1, 4})
        assert steps(folder) == kept
        assert folder.has_checkpoint()
        assert checkpoint.load(folder.last()).state == {"step": step}
        assert checkpoint.load(folder.best()).state == {"step": kept[0]}


def test_save_removes_what_a_crash_left(folder: RunFolder) -> None:
    """Law: a half-written checkpoint does not stay for ever."""
    part = folder.path / "checkpoints" / ".step-00000002.part-99"
    part.mkdir()
    (part / "state.pt").write_bytes(b"half")
    save(folder, 1, best=True)
    assert steps(folder) == [1]


@pytest.mark.parametrize("better", [True, False])
@pytest.mark.parametrize("done", ["checkpoint", "best.json"])
def test_a_crash_between_the_pointers(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, done: str, better: bool
) -> None:
    """Law: a run killed after its checkpoint or after one pointer resumes from before.

    It comes to the same step again, and leaves the same last and best.
    """
    save(folder, 1, best=True)
    point = checkpoint.point

    def killed(pointer: Path, directory: Path) -> None:
        if done == "checkpoint" or pointer.name == "last.json":
            raise KeyboardInterrupt
        point(pointer, directory)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "point", killed)
        with pytest.raises(KeyboardInterrupt):
            save(folder, 2, best=better)
    assert checkpoint.load(folder.last()).state == {"step": 1}
    save(folder, 2, best=better)
    assert checkpoint.load(folder.last()).state == {"step": 2}
    assert checkpoint.load(folder.best()).state == {"step": 2 if better else 1}
    assert steps(folder) == ([2] if better else [1, 2])


def test_a_crash_while_writing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: an error in mid-checkpoint leaves the one before, whole and pointed to."""
    save(folder, 1, best=True)
    before = tree(folder.path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            save(folder, 2, best=True)
    assert tree(folder.path) == before


def test_no_checkpoint(folder: RunFolder) -> None:
    """Law: asking for a checkpoint that was never made names the missing file."""
    with pytest.raises(CheckpointError) as caught:
        folder.last()
    pointer = folder.path / "checkpoints" / "last.json"
    assert str(caught.value) == (
        f"there is no checkpoint here: {pointer} does not exist."
    )


def test_publish_model(folder: RunFolder) -> None:
    """Law: the model appears whole; a failure leaves the one from before."""

    def writer(name: str, text: str) -> Any:
        def save_pretrained(place: Path) -> None:
            place.mkdir(exist_ok=True)
            (place / name).write_text(text)

        return SimpleNamespace(save_pretrained=save_pretrained)

    def broken(_: Path) -> None:
        raise OSError(28, "No space left on device")

    folder.publish_model(writer("weights", "old"), writer("vocabulary", "old"))
    assert tree(folder.model) == {"weights": b"old", "vocabulary": b"old"}
    with pytest.raises(OSError, match="No space"):
        folder.publish_model(
            writer("weights", "new"), SimpleNamespace(save_pretrained=broken)
        )
    assert tree(folder.model) == {"weights": b"old", "vocabulary": b"old"}
    folder.publish_model(writer("weights", "new"), writer("words", "new"))
    assert tree(folder.model) == {"weights": b"new", "words": b"new"}
    assert not (folder.path / ".model.part").exists()


def test_settings_are_text(folder: RunFolder) -> None:
    """Law: config.json is JSON that a person can read, a setting a line."""
    text = (folder.path / "config.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"seed": 1}
    assert len(text.splitlines()) == 3

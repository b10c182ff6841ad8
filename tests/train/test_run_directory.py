"""The folder of a run: what may be written, what a crash leaves, what stays."""

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_files import refused, tree

from halfstep.checkpoint import atomic_directory, single
from halfstep.errors import UserError
from halfstep.train import torchrun
from halfstep.train.config import TrainConfig
from halfstep.train.output.run_directory import RunFolder

FILES = (
    *("metrics.jsonl", "summary.json", "report.html", "environment.json"),
    *("profile.json", "config.json"),
)
FOLDERS = ("checkpoints", "model", "tensorboard")
FIX = "Fix that, then go on with --resume."
OF_NO_PROCESS = 2**30  # more than any system gives


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def not_written(path: Path, why: str = "No space left on device") -> str:
    return f"{path} could not be written: {why}. {FIX}"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.begin({"seed": 1}, overwrite=False)
    return found


def save(folder: RunFolder, step: int, **notes: int) -> None:
    number = torch.tensor(float(step))
    path = folder.checkpoint_path(step)
    with folder.writing(path):
        own = {"step": step} | notes
        single.save(path, {"w": number}, {"step": step}, own, replace=True)


def newest_of(folder: RunFolder) -> tuple[Any, list[str]]:
    found = folder.newest(single.load)
    assert found is not None
    return found[0].state, found[1]


def names(folder: RunFolder) -> set[str]:
    return {each.name for each in (folder.path / "checkpoints").iterdir()}


def called(steps: Iterable[int]) -> set[str]:
    return {f"step-{step:08d}" for step in steps}


# Beginning


def test_begin(tmp_path: Path) -> None:
    """Law: a run begins with settings, its launch and a place for checkpoints.

    Empty folders and the identity of another launch stand in no run's way.
    """
    folder = RunFolder(tmp_path / "a" / "b")
    for name in FOLDERS:
        (folder.path / name).mkdir(parents=True)
    launch = folder.path / "launch.json"
    launch.write_text('{"run_id": null, "agent": "elsewhere 1"}')
    folder.begin({"seed": 3, "data": None}, overwrite=False)
    assert tree(folder.path).keys() == {"config.json", "launch.json", "checkpoints"}
    assert folder.settings() == {"seed": 3, "data": None}
    assert torchrun.read_identity(launch) == torchrun.identity()
    assert folder.records() == folder.steps() == []
    assert not folder.has_checkpoint()


@pytest.mark.parametrize("name", [*FILES, "resolved.toml", *FOLDERS])
def test_a_run_is_not_written_over(tmp_path: Path, name: str) -> None:
    """Law: any trace of a run refuses another; nothing is changed."""
    held = tmp_path / name
    (held if "." in name else held / "something").mkdir(parents=True)
    before = tree(tmp_path)
    message = refused(RunFolder(tmp_path).begin, {}, overwrite=False)
    assert message.startswith(f"{tmp_path} already holds a run ({name}); add --resume")
    assert tree(tmp_path) == before


def test_overwrite(folder: RunFolder) -> None:
    """Law: --overwrite removes the run and leaves everything that is not its own."""
    root = folder.path
    save(folder, 1)
    for name in ("model", ".model.part-99", ".model.old-99", "plots"):
        (root / name).mkdir()
    theirs = ("notes.txt", ".hidden", ".0af.tmp", "plots/metrics.jsonl")
    for name in (*FILES, "model/config.json", f".{'0af' * 5}1.tmp", *theirs):
        (root / name).write_text("old")
    (root / "config.json").write_text(json.dumps(asdict(TrainConfig())))
    folder.begin({"seed": 2}, overwrite=True)
    left = tree(root)
    assert left.pop("config.json") == b'{\n "seed": 2\n}'
    assert left.pop("launch.json") == json.dumps(torchrun.identity()).encode()
    assert left.pop("checkpoints") is left.pop("plots") is None
    assert left == dict.fromkeys(theirs, b"old")


def test_overwrite_of_what_is_no_run(tmp_path: Path) -> None:
    """Law: --overwrite removes nothing that no run of halfstep has written."""
    (tmp_path / "metrics.jsonl").write_text("precious")
    for config in (None, "[]", '{"model": 1, "level": 1}'):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        before = tree(tmp_path)
        message = refused(RunFolder(tmp_path).begin, {}, overwrite=True)
        assert message.startswith(f"--overwrite: {tmp_path} holds files of these name")
        assert tree(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "photos/", "resolved.txt"])
def test_a_folder_of_others(tmp_path: Path, name: str, *, overwrite: bool) -> None:
    """Law: no run begins among files that no run has written; hidden ones may be."""
    (tmp_path / ".keep").write_text("")
    (tmp_path / "lost+found").mkdir()
    folder = RunFolder(tmp_path)
    folder.begin({"seed": 1}, overwrite=overwrite)
    for each in ("config.json", "launch.json"):
        (tmp_path / each).unlink()
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / name).mkdir() if name[-1] == "/" else (tmp_path / name).write_text("x")
    before = tree(tmp_path)
    message = refused(folder.begin, {}, overwrite=overwrite)
    start = f"--out {tmp_path} is not empty ({name.rstrip('/')}) and holds no run"
    assert message.startswith(start)
    assert tree(tmp_path) == before


def test_no_folder_to_write(tmp_path: Path) -> None:
    """Law: a place below a file, or a file itself, is refused with the reason."""
    (tmp_path / "file").write_text("x")
    for place, reason in (("file/run", "Not a directory"), ("file", "File exists")):
        message = refused(RunFolder(tmp_path / place).begin, {}, overwrite=True)
        start = f"--out {tmp_path / place} cannot be written: {reason}; choose another "
        assert message.startswith(start)
    assert tree(tmp_path) == {"file": b"x"}


# Settings


def test_no_settings(tmp_path: Path) -> None:
    """Law: resuming where there is no run, or a damaged one, says which file."""
    config = tmp_path / "config.json"
    (tmp_path / "file").write_text("x")
    for name in ("nothing", "file"):
        message = refused(RunFolder(tmp_path / name).settings)
        assert message == f"{tmp_path / name} holds no run; it has no config.json."
    for text in ("{", "[]"):
        config.write_text(text)
        message = refused(RunFolder(tmp_path).settings)
        assert message == f"{config} is damaged: it holds no settings."


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
        assert single.load(last).notes == {"step": 3, "turn": content}


def test_rewind_sweeps(folder: RunFolder) -> None:
    """Law: what processes left that were killed while they wrote is removed."""
    save(folder, 1)
    folder.rewind(1)
    before = tree(folder.path)
    for name in (".step-00000002.part-99", ".step-00000001.old-99", ".a.gone-7"):
        (folder.path / "checkpoints" / name).mkdir()
    (folder.path / ".model.part-99").mkdir()
    (folder.path / ".0123456789abcdef.tmp").write_text("half a report")
    folder.rewind(1)
    assert tree(folder.path) == before


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
    (folder.path / "nothing").mkdir()
    (folder.path / "nothing" / "checkpoints").write_text("a file")
    assert RunFolder(folder.path / "nothing").newest(single.load) is None


def test_newest(folder: RunFolder) -> None:
    """Law: the newest is loaded; one that is damaged is named, the one before used.

    A checkpoint that was moved to be replaced has its name again.
    """
    assert folder.newest(single.load) is None
    for step in (1, 2, 10):
        save(folder, step)
    path = folder.checkpoint_path(10)
    path.rename(path.with_name(f".{path.name}.old-99"))
    assert newest_of(folder) == ({"step": 10}, [])
    assert names(folder) == called((1, 2, 10))
    (path / "state.pt").write_bytes(b"")
    state, (fault,) = newest_of(folder)
    assert state == {"step": 2}
    start = "the checkpoint of step 10 is not used: checkpoint file "
    assert fault.startswith(f"{start}{path / 'state.pt'} is truncated")


def test_checkpoints_that_are_lost(folder: RunFolder) -> None:
    """Law: metrics of two evaluations and no checkpoint: the run is not begun anew."""
    folder.log({"step": 1, "event": "eval"})
    assert folder.newest(single.load) is None
    folder.log({"step": 2, "event": "eval"})
    start = " has lost its checkpoints: metrics.jsonl tells of 2 evaluations. Restore"
    with pytest.raises(UserError, match=f"checkpoints{start}"):
        folder.newest(single.load)


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [(1, 2, {2, 5}), (2, 1, {1, 4, 5}), (1, 5, {5}), (9, 1, {1, 2, 3, 4, 5})],
)
def test_prune(folder: RunFolder, keep: int, best: int, kept: set[int]) -> None:
    """Law: the newest stay, and the best that they name, and no others.

    One whose manifest cannot be read is neither counted nor deleted.
    """
    for step in (1, 2, 3, 4, 5, 6):
        save(folder, step, best_step=min(step, best))
    (folder.checkpoint_path(6) / "manifest.json").write_text("{")
    folder.prune(keep)
    assert names(folder) == called(kept | {6})
    for step in kept:
        assert single.load(folder.checkpoint_path(step)).state == {"step": step}


# The model


def saved_as(name: str, text: str) -> SimpleNamespace:
    def save_pretrained(place: Path) -> None:
        place.mkdir(exist_ok=True)
        (place / name).write_text(text)

    return SimpleNamespace(save_pretrained=save_pretrained)


def unsealed(folder: RunFolder) -> dict[str, bytes | None]:
    """Return what is in the model's folder beside its manifest, which fits it."""
    manifest = atomic_directory.read(folder.model, atomic_directory.MODEL)
    atomic_directory.verify(folder.model, manifest)
    found = tree(folder.model)
    del found[atomic_directory.MANIFEST]
    return found


def test_publish_model(folder: RunFolder) -> None:
    """Law: the model appears whole; a failure leaves the one from before."""
    old = {"weights": b"old", "vocabulary": b"old"}
    folder.save_model(saved_as("weights", "old"), saved_as("vocabulary", "old"))
    assert unsealed(folder) == old
    broken = SimpleNamespace(save_pretrained=no_space)
    assert refused(
        folder.save_model, saved_as("weights", "new"), broken
    ) == not_written(folder.model)
    assert unsealed(folder) == old
    assert not [*folder.path.glob(".model.*")]
    part = folder.path / f".model.part-{OF_NO_PROCESS}"
    part.mkdir()
    (part / "rest").write_text("of a killed process")
    folder.save_model(saved_as("weights", "new"), saved_as("words", "new"))
    assert unsealed(folder) == {"weights": b"new", "words": b"new"}
    assert not [*folder.path.glob(".model.*")]


@pytest.mark.parametrize("renamed", [True, False])
def test_a_run_killed_while_it_publishes(folder: RunFolder, *, renamed: bool) -> None:
    """Law: a kill between the renames, or after, leaves one model, and no other."""
    folder.save_model(*[saved_as("weights", "old")] * 2)
    folder.rewind(0)
    before = tree(folder.path)
    folder.model.rename(folder.path / ".model.old-99")
    if renamed:
        folder.save_model(*[saved_as("weights", "new")] * 2)
    folder.rewind(0)
    assert tree(folder.path).keys() == before.keys()
    assert unsealed(folder) == {"weights": b"new" if renamed else b"old"}


def test_write(folder: RunFolder) -> None:
    """Law: a file is written in one piece; where it cannot be, the reason is told."""
    folder.write("summary.json", "{}")
    assert (folder.path / "summary.json").read_text() == "{}"
    for name, use in (
        ("report.html", lambda: folder.write("report.html", "x")),
        ("metrics.jsonl", lambda: folder.log({"step": 1})),
    ):
        (folder.path / name).mkdir()
        assert refused(use) == not_written(folder.path / name, "Is a directory")


def test_names_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the folder's own name is waited for too, where its place may be read."""
    seen: list[Path] = []

    def flush(path: Path) -> None:
        seen.append(path)
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(atomic_directory, "flush", flush)
    RunFolder(tmp_path / "run").begin({}, overwrite=False)
    assert seen == [tmp_path / "run", tmp_path]


# Metrics: lines that come back, of which a crash can cut only the last


def test_metrics_round_trip(folder: RunFolder) -> None:
    """Law: records come back to the last bit; JSON has no inf and no NaN, but null."""
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 0.1 + 0.2, "names": ["a.b", "\u2028"]},
        {"step": 2, "loss": float("inf"), "grad_norm": None},
        {"step": 3, "loss": [float("nan"), {"a": -float("inf")}]},
    ]
    for record in records:
        folder.log(record)
    records[1]["loss"], records[2]["loss"] = None, [None, {"a": None}]
    assert folder.records() == records
    before = folder.metrics.read_bytes()
    folder.rewind(3)
    assert folder.metrics.read_bytes() == before


def test_a_torn_line(folder: RunFolder) -> None:
    """Law: a line that a crash cut is left out, and resuming removes it."""
    parts = ('{"st', '{"step": 3, "loss": 1.5', "\0\0\0\0", "{")
    for step, torn in enumerate(parts, 1):
        folder.log({"step": step})
        with folder.metrics.open("a") as file:
            file.write(torn)
        assert folder.records() == [{"step": each} for each in range(1, step + 1)]
        folder.rewind(step)


def test_a_damaged_line(folder: RunFolder) -> None:
    """Law: a line that is whole and no record is named by its number."""
    for line in (b"", b"{", b"[]", b'{"loss": 1}', b'{"step": "1"}', b"\xff\xfe"):
        folder.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
        before = folder.metrics.read_bytes()
        for use in (folder.records, lambda: folder.rewind(1)):
            start = f"{folder.metrics} line 2 is damaged: it is not a record of a st"
            assert refused(use).startswith(start)
        assert folder.metrics.read_bytes() == before


def test_rewind(folder: RunFolder) -> None:
    """Law: what comes after the checkpoint's step is dropped, evaluations too."""
    folder.rewind(0)
    assert folder.metrics.read_bytes() == b""
    kept = [{"step": 1}, {"step": 2}, {"step": 2, "event": "eval"}]
    for record in (*kept, {"step": 3}, {"step": 4}, {"step": 4, "event": "eval"}):
        folder.log(record)
    folder.rewind(2)
    assert folder.records() == kept
    folder.rewind(0)
    assert folder.records() == []
    assert folder.metrics.exists()

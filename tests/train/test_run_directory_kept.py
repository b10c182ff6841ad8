"""Damages of a run's checkpoints: the newest is named, the one before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from data_files import tree

from halfstep.checkpoint import atomic_directory, single
from halfstep.errors import UserError
from halfstep.train.output.run_directory import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.pt", "manifest.json"
MARK = "ran"
Damage = tuple["Callable[[Path], None]", str]


class Runs:
    """What, loaded by a careless reader, makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        """Have code run on loading."""
        return os.mkdir, (str(self.mark),)


def truncate(name: str, kept: Callable[[int], int]) -> Callable[[Path], None]:
    """Cut a file to a length told from its own."""

    def damage(path: Path) -> None:
        os.truncate(path / name, kept((path / name).stat().st_size))

    return damage


def flip(name: str, place: float) -> Callable[[Path], None]:
    """Flip one bit, at a share of the length of a file."""

    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        (path / name).write_bytes(data)

    return damage


def delete(name: str) -> Callable[[Path], None]:
    """Delete a file."""
    return lambda path: (path / name).unlink()


def folder_for(name: str) -> Callable[[Path], None]:
    """Put a directory in the place of a file."""

    def damage(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return damage


def broken_link(name: str) -> Callable[[Path], None]:
    """Put a link to nothing in the place of a file."""

    def damage(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(path / "nowhere")

    return damage


def before_it(name: str) -> Callable[[Path], None]:
    """Put the file of the checkpoint before in the place of a file."""

    def damage(path: Path) -> None:
        shutil.copy(path.with_name("step-00000001") / name, path / name)

    return damage


def text(content: str) -> Callable[[Path], None]:
    """Replace the manifest by a text."""

    def damage(path: Path) -> None:
        (path / MANIFEST).write_text(content)

    return damage


def says(*, again: bool, **facts: object) -> Callable[[Path], None]:
    """Let the manifest say something else, sealed again or not; None: not at all."""

    def damage(path: Path) -> None:
        manifest = json.loads((path / MANIFEST).read_text()) | facts
        manifest = {k: v for k, v in manifest.items() if v is not None}
        if again:
            manifest["seal"] = atomic_directory.seal(manifest)
        (path / MANIFEST).write_text(json.dumps(manifest))

    return damage


def foreign(name: str, data: Callable[[Path], bytes]) -> Callable[[Path], None]:
    """Replace a file, and say so in a manifest whose seal is right."""

    def damage(path: Path) -> None:
        (path / name).write_bytes(data(path))
        manifest = json.loads((path / MANIFEST).read_text())
        whole = (path / name).read_bytes()
        found = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
        manifest["files"][name] = found
        says(again=True, files=manifest["files"])(path)

    return damage


def torch_code(path: Path) -> bytes:
    """Return what torch.save makes of an object that runs code."""
    torch.save({"a": Runs(path.parent.parent / MARK)}, path / STATE)
    return (path / STATE).read_bytes()


def nothing(path: Path) -> None:
    """Leave an empty directory."""
    for each in path.iterdir():
        each.unlink()


def a_file(path: Path) -> None:
    """Put a file in the place of the directory."""
    shutil.rmtree(path)
    path.write_text("x")


ALIKE = "its SHA-256 is not the one"
SIZE = "is truncated or altered"
JSON = "it is not valid JSON"
SEAL = "its seal is not that of what it says"
HERE = "was not written by halfstep"
GONE = "it has no manifest.json"

DAMAGES: dict[str, Damage] = {
    "weights empty": (truncate(WEIGHTS, lambda _: 0), SIZE),
    "weights a folder": (folder_for(WEIGHTS), f"has no {WEIGHTS}"),
    "weights of before": (before_it(WEIGHTS), ALIKE),
    "weights foreign": (foreign(WEIGHTS, lambda _: b"x" * 99), HERE),
    "state middle bit": (flip(STATE, 0.5), ALIKE),
    "state a broken link": (broken_link(STATE), f"has no {STATE}"),
    "state with code": (foreign(STATE, torch_code), "more than tensors"),
    "manifest gone": (delete(MANIFEST), GONE),
    "manifest a folder": (folder_for(MANIFEST), GONE),
    "manifest of before": (before_it(MANIFEST), ALIKE),
    "manifest deep": (text("[" * 100_000), JSON),
    "seal gone": (says(again=False, seal=None), SEAL),
    "notes gone": (says(again=True, notes=None), HERE),
    "format sharded": (
        says(again=True, format=atomic_directory.SHARDED),
        "says it is a",
    ),
    "files gone": (says(again=True, files=None), HERE),
    "files outside": (says(again=True, files={"../x": {}}), HERE),
    "files none": (says(again=True, files={}), "names others"),
    "aliases of nothing": (says(again=True, aliases={"a": "b"}), HERE),
    "an empty folder": (nothing, GONE),
    "a file": (a_file, GONE),
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run with checkpoints of the steps 1 and 2."""
    found = RunFolder(tmp_path / "run")
    found.begin({"seed": 1}, overwrite=False)
    for step in (1, 2):
        draw = torch.Generator().manual_seed(step)
        weights = {"w": torch.randn(64, generator=draw)}
        state = {"s": torch.randn(64, generator=draw)}
        # As long as the other one's, so that a mixture is told by its bytes alone.
        found.save(step, weights, state, {"step": step})
        found.log({"step": step})
    return found


def numbers(found: single.Checkpoint) -> tuple[list[float], list[float], Any]:
    """Return what a checkpoint of `folder` holds, to compare."""
    return found.weights["w"].tolist(), found.state["s"].tolist(), found.notes


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_is_damaged(folder: RunFolder, name: str) -> None:
    """Law: it is named with its fault, the one before is used, nothing is run.

    Nothing is changed, and going back keeps what is damaged, under another name.
    """
    before = numbers(single.load(folder.checkpoint_path(1)))
    damage, fault = DAMAGES[name]
    damage(folder.checkpoint_path(2))
    kept = tree(folder.path)
    found = folder.newest(single.load)
    assert found is not None
    assert numbers(found[0]) == before
    assert len(found[1]) == 1
    line = found[1][0]
    assert line.startswith("the checkpoint of step 2 is not used: ")
    assert "\n" not in line
    assert fault in line
    assert str(folder.checkpoint_path(2)) in line
    assert tree(folder.path) == kept
    assert not (folder.path / MARK).exists()
    folder.rewind(1)
    assert folder.steps() == [1]
    assert folder.records() == [{"step": 1}]
    aside = "checkpoints/damaged-step-00000002"
    old = {k: v for k, v in kept.items() if k.startswith("checkpoints/step-00000002")}
    moved = {k.replace("checkpoints/step-00000002", aside): v for k, v in old.items()}
    assert old
    assert {k: v for k, v in tree(folder.path).items() if aside in k} == moved


def test_all_are_damaged(folder: RunFolder) -> None:
    """Law: one line says that none is whole, names them, and tells the newest's fault.

    Nothing is changed.
    """
    damage, fault = DAMAGES["state with code"]
    damage(folder.checkpoint_path(2))
    truncate(STATE, lambda _: 0)(folder.checkpoint_path(1))
    kept = tree(folder.path)
    with pytest.raises(UserError) as caught:
        folder.newest(single.load)
    line = str(caught.value)
    assert line.startswith(
        f"no checkpoint in {folder.path / 'checkpoints'} is whole (step-00000002, "
        "step-00000001); start anew with another --out. Of the newest: "
    )
    assert "\n" not in line
    assert fault in line
    assert tree(folder.path) == kept
    assert not (folder.path / MARK).exists()


def test_the_code_would_run(tmp_path: Path) -> None:
    """Law: the state that is refused unrun does run where a careless reader loads."""
    path = tmp_path / "run" / "checkpoints" / "step"
    path.mkdir(parents=True)
    torch_code(path)
    torch.load(path / STATE, weights_only=False)
    assert (tmp_path / "run" / MARK).is_dir()


def test_a_fault_of_another_sort(folder: RunFolder) -> None:
    """Law: what is no damage of a checkpoint is not passed over."""

    def load(_: Path) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        folder.newest(load)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_other_files_are_damaged(folder: RunFolder, name: str) -> None:
    """Law: a directory in the place of a file is refused in a line that names it."""
    path = folder.path / name
    path.unlink()
    path.mkdir()
    use = folder.records if name == "metrics.jsonl" else folder.settings
    with pytest.raises(UserError) as caught:
        use()
    assert str(caught.value) == f"{path} cannot be read: Is a directory."


def test_checkpoints_are_a_file(folder: RunFolder) -> None:
    """Law: a file in the place of the checkpoints holds none."""
    path = folder.path / "checkpoints"
    shutil.rmtree(path)
    path.write_text("x")
    assert folder.steps() == []
    assert folder.newest(single.load) is None

"""Directories that ranks write together: sealed, and whole or absent."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from sharded_files import (  # noqa: F401 -- fixtures among them
    INDEX,
    PART,
    alone,
    cut,
    flip,
    kept_checkpoint,
    original_checkpoint,
    refusal,
    trained,
)
from sharding import shared, start
from small_training import same
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from halfstep.checkpoint import atomic_directory, single
from halfstep.checkpoint.atomic_directory import MANIFEST, CheckpointError
from halfstep.session import fsdp_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


def test_round_trip(kept: Path, original: Path) -> None:
    """Law: what was saved comes back, sealed, with its notes, wherever it is moved."""
    moved = kept.rename(kept.with_name("moved"))
    session, expected = trained(1), trained()
    fsdp_checkpoint.load(session, moved)
    assert same(session.state_dict(), expected.state_dict())
    assert atomic_directory.read(moved)["notes"] == {"step": 1}
    files = {path.name for path in moved.iterdir()}
    assert atomic_directory.read(moved)["files"].keys() == files - {MANIFEST}
    assert [path.name for path in original.parent.iterdir()] == ["c"]


# Damage


def other_shard(path: Path) -> None:
    other = path.parent.with_name("other")
    fsdp_checkpoint.save(trained(3), other)
    shutil.copy(other / path.name, path)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut part": (PART, cut, "is truncated or altered: "),
    "bit in part": (PART, flip, "is damaged: its SHA-256 is not the one in "),
    "no part": (PART, Path.unlink, "has no __0_0.distcp; it is incomplete."),
    "another's part": (PART, other_shard, f"/c/{PART} is "),
    "cut index": (INDEX, cut, "is truncated or altered: "),
    "bit in index": (INDEX, flip, "is damaged: its SHA-256 is not the one in "),
    "no index": (INDEX, Path.unlink, "has no index.json; it is incomplete."),
    "cut manifest": (MANIFEST, cut, "is damaged: it is not valid JSON."),
    "no manifest": (MANIFEST, Path.unlink, "has no manifest.json, so it cannot be "),
    "a plain one": (
        "",
        lambda path: (shutil.rmtree(path), single.save(path, {}, {}, {})),
        "is not a halfstep sharded checkpoint: manifest.json says it is a halfstep ",
    ),
    "nothing": ("", shutil.rmtree, "has no file .metadata, which is written last."),
    "an empty directory": (
        "",
        lambda path: (shutil.rmtree(path), path.mkdir()),
        "has no file .metadata, which is written last.",
    ),
}


@pytest.mark.parametrize("word", DAMAGE)
def test_damage(word: str, kept: Path) -> None:
    """Law: what is not whole is refused in one line that names it."""
    name, damage, fault = DAMAGE[word]
    damage(kept / name)
    line = refusal(kept)
    assert fault in line
    assert str(kept) in line
    assert len(line.split()) <= 35
    assert "\n" not in line


def test_read_as_a_plain_one(kept: Path) -> None:
    """Law: a sharded checkpoint is not taken for a plain one."""
    with pytest.raises(CheckpointError) as caught:
        single.load(kept)
    assert str(caught.value) == (
        f"{kept} is not a halfstep checkpoint: manifest.json says it is a halfstep "
        "sharded checkpoint."
    )


def test_replaced(kept: Path) -> None:
    """Law: what exists is replaced where that is asked for, and only there."""
    with pytest.raises(CheckpointError, match="a checkpoint is never written over"):
        fsdp_checkpoint.save(trained(2), kept)
    fsdp_checkpoint.save(trained(2), kept, replace=True)
    session = trained(1)
    fsdp_checkpoint.load(session, kept)
    assert same(session.state_dict(), trained(2).state_dict())
    assert [path.name for path in kept.parent.iterdir()] == ["c"]


def test_another_program_is_first(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what another finished meanwhile is not written over."""
    path, original = kept.with_name("later"), atomic_directory.commit

    def late(*given: Any, **words: Any) -> None:
        path.mkdir()
        (path / "file").write_text("another's")
        original(*given, **words)

    monkeypatch.setattr(atomic_directory, "commit", late)
    with pytest.raises(CheckpointError, match="a checkpoint is never written over"):
        fsdp_checkpoint.save(trained(2), path)
    assert sorted(each.name for each in kept.parent.iterdir()) == ["c", "later"]
    assert (path / "file").read_text() == "another's"


# Several ranks


def _fail(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def fails(moment: str, rank: int) -> dict[str, Any]:
    folder = shared() / f"{moment} {rank}"
    session = trained(dist.get_rank(), shard=True)
    fsdp_checkpoint.save(session, folder / "before")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            owner, name = MOMENTS[moment]
            patch.setattr(owner, name, _fail)
        try:
            fsdp_checkpoint.save(session, folder / "c")
        except CheckpointError as error:
            said = str(error).replace(str(folder), "FOLDER")
        else:
            said = "nothing"
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    fsdp_checkpoint.load(session, folder / "before")
    fsdp_checkpoint.save(session, folder / "c")
    fsdp_checkpoint.load(session, folder / "c")
    return {"said": said, "left": left}


def damaged(name: str) -> dict[str, Any]:
    session, folder = trained(dist.get_rank(), shard=True), shared() / f"cut {name}"
    fsdp_checkpoint.save(session, folder)
    if dist.get_rank() == 0:
        cut(folder / name)
    dist.barrier()
    before = copy.deepcopy(fsdp_checkpoint.full_tensors(session.weights()))
    try:
        fsdp_checkpoint.load(session, folder)
    except CheckpointError as error:
        said = str(error).replace(str(folder), "FOLDER")
        after = fsdp_checkpoint.full_tensors(session.weights())
        return {"said": said, "untouched": same(before, after)}
    return {"said": "nothing"}


MOMENTS: dict[str, tuple[Any, str]] = {
    "torch": (FileSystemWriter, "write_data"),
    "digest": (atomic_directory, "digest"),
    "make_temporary": (atomic_directory, "make_temporary"),
    "commit": (atomic_directory, "commit"),
}
FAILS = [
    ("torch", 0),
    ("torch", 1),
    ("digest", 1),
    ("make_temporary", 0),
    ("commit", 0),
]
PARTS = (INDEX, PART, "__1_0.distcp")
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"fails {fail}": functools.partial(fails, *fail) for fail in FAILS},
    **{f"damaged {name}": functools.partial(damaged, name) for name in PARTS},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(
        "tests.session.test_fsdp_checkpoint_damage",
        2,
        str(tmp_path_factory.mktemp("ranks")),
    )


@pytest.mark.parametrize("fail", FAILS, ids=str)
def test_one_rank_fails(ranks: list[dict[str, Any]], fail: tuple[str, int]) -> None:
    """Law: where one rank cannot write, all raise at once, and nothing is left."""
    found = [rank[f"fails {fail}"] for rank in ranks]
    assert all(isinstance(each, dict) for each in found), found
    start_, end = "checkpoint FOLDER/c could not be written: ", ". Mend that, or choose"
    for rank, each in enumerate(found):
        assert "No space left on device" in each["said"]
        assert ("rank 1: " in each["said"]) == (fail[1] == 1 and rank == 0)
        assert start_ in each["said"]
        assert end in each["said"]
        assert each["left"] == ["before"]


@pytest.mark.parametrize("name", PARTS)
def test_damage_is_seen_by_all(ranks: list[dict[str, Any]], name: str) -> None:
    """Law: a damaged file is refused on every rank, whichever has read it."""
    found = [rank[f"damaged {name}"] for rank in ranks]
    assert all(isinstance(each, dict) for each in found), found
    for each in found:
        assert f"FOLDER/{name} is truncated or altered: " in each["said"]
        assert each["untouched"]

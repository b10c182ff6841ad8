"""Checkpoints on disks that are full, read-only or gone, and in killed processes.

Started as a program, this file saves under limits, and is killed while it saves.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forks import run_forked

from halfstep.checkpoint import CheckpointError, atomic_directory, load, save

WRITTEN = ("weights.safetensors", "state.pt", "manifest.json")  # in this order
LARGE = 20_000
"""Bytes of the one large file."""
LIMITS = (0, 511, 16_000, 3 * LARGE)
KILLS = 8
"""Each of four moments, twice."""

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="no limits, no kill -9")


def contents(large: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    size = {name: LARGE if name == large else 8 for name in WRITTEN}
    numbers = [torch.zeros(size[name] // 4) for name in WRITTEN[:2]]
    return {"w": numbers[0]}, {"s": numbers[1]}, {"n": "x" * size["manifest.json"]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def said(path: Path, reason: int) -> str:
    return (
        f"checkpoint {path} could not be written: {os.strerror(reason)}. Fix that, or "
        "choose another place."
    )


@contextlib.contextmanager
def refused(path: Path, reason: int) -> Iterator[None]:
    with pytest.raises(CheckpointError) as caught:
        yield
    assert str(caught.value) == said(path, reason)


def raising(reason: int) -> Mock:
    return Mock(side_effect=OSError(reason, os.strerror(reason)))


# Programs


def under_limits(folder: Path) -> list[Any]:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = []
    for large in WRITTEN:
        for limit in LIMITS:
            path, words = folder / f"{large}-{limit}", "whole"
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                save(path, *contents(large))
            except CheckpointError as error:
                words = str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            seen.append([large, limit, words, names(folder)])
            shutil.rmtree(path, ignore_errors=True)
    return seen


def killed(folder: Path) -> list[Any]:
    seen = []
    for turn in range(KILLS):
        child = os.fork()
        if child == 0:
            calls = []

            def fsync(
                _: int, last: int = 1 + turn % 4, calls: list[int] = calls
            ) -> None:
                calls.append(1)
                if len(calls) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = fsync
            save(folder / "c", *contents("state.pt"))
            os._exit(1)  # It was to be killed.
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        seen.append(names(folder))
    return seen


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return where the program has saved, and what each part of it has seen."""
    path = tmp_path_factory.mktemp("ran")
    (done,) = run_forked(__file__, str(path))
    assert done.returncode == 0, done.stderr
    return path, json.loads((path / "seen.json").read_text())


# Tests


@unix
def test_files_too_large(ran: tuple[Path, Any], tmp_path: Path) -> None:
    """Law: whatever byte of whatever file cannot be written, the reason is told.

    Nothing is left. Where the limit is above every file, the checkpoint is whole.
    """
    sizes = {}
    for large in WRITTEN:
        save(tmp_path / large, *contents(large))
        files = {name: (tmp_path / large / name).stat().st_size for name in WRITTEN}
        assert max(files, key=files.__getitem__) == large
        sizes[large] = files
    folder, (seen, _) = ran
    hit = set()
    for large, limit, words, left in seen:
        over = [name for name in WRITTEN if sizes[large][name] > limit]
        hit |= set(over[:1])
        path = folder / "limits" / f"{large}-{limit}"
        assert words == (said(path, errno.EFBIG) if over else "whole"), (large, limit)
        assert left == ([] if over else [path.name])
    assert hit == set(WRITTEN)
    assert len(seen) == len(WRITTEN) * len(LIMITS)


@unix
def test_killed_while_saving(ran: tuple[Path, Any]) -> None:
    """Law: kill -9 in each of many saves leaves one temporary directory at most."""
    folder, (_, seen) = ran[0] / "killed", ran[1]
    assert len(seen) == KILLS
    assert {len(left) for left in seen} == {1}
    assert all(left[0].startswith(".c.part-") for left in seen)
    assert len({left[0] for left in seen}) > 1
    save(folder / "c", *contents("state.pt"))
    assert names(folder) == ["c"]
    load(folder / "c")


def test_the_reason_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where tidying up fails too, it is the first reason that is told."""
    monkeypatch.setattr(os, "fsync", raising(errno.ENOSPC))
    with monkeypatch.context() as patch:
        for name in ("rmdir", "unlink"):
            patch.setattr(os, name, raising(errno.EIO))
        with refused(tmp_path / "c", errno.ENOSPC):
            save(tmp_path / "c", {}, {}, {})
    assert len(said(tmp_path / "c", errno.ENOSPC).split()) <= 35


# Replaced, and killed or refused half-way

DEAD = 2**30
"""No process has this number."""


def refusing(monkeypatch: pytest.MonkeyPatch, word: str, reason: int) -> None:
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if word in self.name:
            raise OSError(reason, os.strerror(reason), str(self))
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def moved_aside(path: Path, number: int = DEAD) -> Path:
    old = path.with_name(f".{path.name}.old-{number}")
    path.rename(old)
    return old


def test_the_only_copy_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what was moved to be replaced is back before another replaces it."""
    path = tmp_path / "c"
    save(path, {}, {"turn": 1}, {})
    moved_aside(path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", raising(errno.ENOSPC))
        with refused(path, errno.ENOSPC):
            save(path, {}, {"turn": 2}, {}, replace=True)
    assert load(path).state == {"turn": 1}
    moved_aside(path)
    with pytest.raises(CheckpointError, match="never written over another"):
        save(path, {}, {"turn": 2}, {})
    save(path, {}, {"turn": 3}, {}, replace=True)
    assert load(path).state == {"turn": 3}
    assert names(tmp_path) == ["c"]


def test_a_copy_that_cannot_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: it is told, and nothing is removed, by a save or by a sweep of all."""
    path = tmp_path / "c"
    save(path, {}, {"turn": 1}, {})
    old = moved_aside(path)
    with monkeypatch.context() as patch:
        refusing(patch, ".old-", errno.EIO)
        with refused(path, errno.EIO):
            save(path, {}, {"turn": 2}, {}, replace=True)
        for name in ("restore_replaced", "remove_leftovers"):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                getattr(atomic_directory, name)(tmp_path)
    assert load(old).state == {"turn": 1}
    atomic_directory.remove_leftovers(tmp_path)
    assert load(path).state == {"turn": 1}


def test_the_name_cannot_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the new one does not get the name, the one before has it again."""
    path = tmp_path / "c"
    save(path, {}, {"turn": 1}, {})
    with monkeypatch.context() as patch:
        refusing(patch, ".part-", errno.EIO)
        with refused(path, errno.EIO):
            save(path, {}, {"turn": 2}, {}, replace=True)
    assert load(path).state == {"turn": 1}
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("before", ["rename_into_place", "rename"])
def test_another_program_is_first(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what another finished meanwhile is not written over, at any moment."""
    path = tmp_path / "c"
    owner: Any = {"rename_into_place": atomic_directory, "rename": Path}[before]
    original = getattr(owner, before)

    def late(*given: Any, **words: Any) -> Any:
        monkeypatch.setattr(owner, before, original)
        path.mkdir()
        (path / "file").write_text("another's")
        return original(*given, **words)

    monkeypatch.setattr(owner, before, late)
    with pytest.raises(CheckpointError, match=r"^.* exists; a checkpoint is never wr"):
        save(path, {}, {}, {})
    assert (path / "file").read_text() == "another's"
    assert names(tmp_path) == ["c"]


@unix
def test_what_living_programs_write_is_theirs(tmp_path: Path) -> None:
    """Law: a save leaves it alone, and removes what the dead of that name left."""
    parts = [tmp_path / f".c.part-{each}" for each in (os.getppid(), 1, DEAD, 10**30)]
    for part in parts:
        part.mkdir()
    save(tmp_path / "c", {}, {}, {})
    assert names(tmp_path) == sorted(["c", *(part.name for part in parts[:2])])
    atomic_directory.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("name", ["manifest.json", "state.pt"])
def test_what_cannot_be_read_is_not_called_absent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the disk does not answer, that is told, of whatever file."""
    path, reason = tmp_path / "c", errno.ESTALE
    save(path, {}, {}, {})
    original = Path.stat

    def silent(self: Path, **words: bool) -> os.stat_result:
        if self.name == name:
            raise OSError(reason, os.strerror(reason), str(self))
        return original(self, **words)

    monkeypatch.setattr(Path, "stat", silent)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    words = f"checkpoint file {path / name} cannot be read: {os.strerror(reason)}. "
    assert str(caught.value).startswith(words)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for part in ("limits", "killed"):
        (place / part).mkdir()
    told = [under_limits(place / "limits"), killed(place / "killed")]
    (place / "seen.json").write_text(json.dumps(told))

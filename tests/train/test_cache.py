"""Prepared files: made once, whole or absent, checked, and cleared away."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from data_files import refused

from halfstep.errors import UserError
from halfstep.train.data import cache

DAY = 86400.0
FACTS = {"of": "test", "size": 3}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))


def write(folder: Path) -> None:
    (folder / "a").write_bytes(b"abc")
    (folder / "b").write_bytes(b"")


def refuse(folder: Path) -> None:
    raise AssertionError(f"{folder} is built again")


WHOLE = {"a": b"abc", "b": b""}


def content(entry: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in entry.iterdir()}
    del files["manifest.json"]
    return files


def names() -> list[str]:
    return sorted(path.name for path in cache.folder().iterdir())


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_an_entry_is_made_once() -> None:
    """Law: the same facts, in any order, find what was built; others are built."""
    entry = cache.get_or_build("rows", FACTS, write)
    assert (content(entry), entry.parent) == (WHOLE, cache.folder())
    assert cache.get_or_build("rows", {"size": 3, "of": "test"}, refuse) == entry
    other = cache.get_or_build("rows", FACTS | {"size": 4}, write)
    assert len({entry, other, cache.get_or_build("tokens", FACTS, write)}) == 3


@pytest.mark.parametrize(
    ("own", "xdg", "place"),
    [
        ("/x/y", "/z", "/x/y"),
        ("", "/z", "/z/halfstep/train"),
        ("", "", "/home/ann/.cache/halfstep/train"),
        ("~/mine", "", "/home/ann/mine"),
        ("mine", "", f"{Path.cwd()}/mine"),
    ],
)
def test_the_folder_is_where_the_environment_says(
    own: str, xdg: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: HALFSTEP_CACHE, else the user's cache, else .cache in the home."""
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("HALFSTEP_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache.folder() == Path(place)
    monkeypatch.setenv("HALFSTEP_CACHE", "~nobody-of-that-name/mine")
    with pytest.raises(UserError, match="set HALFSTEP_CACHE to a folder"):
        cache.folder()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("a", flip),
        ("b", lambda path: path.write_bytes(b"x")),
        ("manifest.json", cut),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_entry_is_made_anew(
    name: str, damage: Callable[[Path], object]
) -> None:
    """Law: a byte that differs is found at the next use, reported, and rebuilt."""
    entry = cache.get_or_build("rows", FACTS, write)
    damage(entry / name)
    with pytest.warns(UserWarning, match="is rebuilt") as caught:
        assert cache.get_or_build("rows", FACTS, write) == entry
    (warning,) = caught
    assert str(warning.message) == f"{entry} is damaged; it is rebuilt."
    assert content(entry) == WHOLE
    cache.get_or_build("rows", FACTS, refuse)


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what the system says against writing is one line that names the cure."""
    fail = Mock(side_effect=OSError(errno.EIO, "so it is"))
    assert refused(cache.get_or_build, "rows", FACTS, fail) == (
        f"{cache.folder()} cannot be written: so it is; set HALFSTEP_CACHE to a "
        "writable folder with free space."
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"file/cache cannot be written: Not a dir"):
        cache.get_or_build("rows", FACTS, write)


def test_one_of_many_builds() -> None:
    """Law: those that come while one builds wait for it and use what it made.

    Of an entry that is damaged, too. Threads stand for processes: a lock is one of an
    open file, and each opens its own.
    """
    flip(cache.get_or_build("rows", FACTS, write) / "a")
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        time.sleep(0.3)
        write(folder)

    with pytest.warns(UserWarning, match="is rebuilt"), ThreadPoolExecutor(3) as pool:
        entries = {*pool.map(lambda _: cache.get_or_build("rows", FACTS, build), "abc")}
    assert len(built) == len(entries) == 1
    assert content(*entries) == WHOLE


def test_what_a_killed_process_left_is_removed() -> None:
    """Law: what it had not finished is no entry, and goes with the next one made."""
    entry = cache.get_or_build("rows", FACTS, write)
    part = entry.with_name(f".{entry.name}.part-{2**30}")
    entry.rename(part)
    assert content(cache.get_or_build("rows", FACTS, write)) == WHOLE
    assert not part.exists()


def test_without_locks_entries_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the file system has no locks, two may build, and one of them wins."""

    def late(folder: Path) -> None:
        assert content(cache.get_or_build("rows", FACTS, write)) == WHOLE
        write(folder)

    no_lock = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=no_lock))
    assert content(cache.get_or_build("rows", FACTS, late)) == WHOLE
    assert [name for name in names() if ".part-" in name] == []


def test_what_is_unused_for_a_month_is_removed() -> None:
    """Law: 30 days after its last use an entry goes; the user's own files stay."""
    old, kept = (cache.get_or_build("rows", {"n": n}, write) for n in (1, 2))
    lock = old.with_name(f".{old.name}.lock")
    number = "0123456789abcdef" * 2
    foreign = [cache.folder() / name for name in ("rows-2020", f"photos-{number}")]
    for path in foreign:
        path.mkdir()
    for path in (old, lock, kept, *foreign):
        age(path, 31)
    cache.get_or_build("rows", {"n": 2}, refuse)
    cache.get_or_build("rows", {"n": 3}, write)
    assert [name for name in names() if old.name in name] == []
    assert all(path.exists() for path in (kept, *foreign))
    age(kept, 29)
    cache.get_or_build("rows", {"n": 4}, write)
    assert kept.exists()


def test_what_others_have_made_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an entry that is whole is used where nothing may be written; no other is."""
    original, fault = os.open, OSError(errno.EROFS, "so it is", "it")

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise fault
        return original(path, flags, mode)

    refused = Mock(side_effect=fault)
    entry = cache.get_or_build("rows", FACTS, write)
    monkeypatch.setattr(os, "open", opened)
    for name in ("utime", "rename", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, refused)
    assert cache.get_or_build("rows", FACTS, refuse) == entry
    message = "written: so it is; set HALF"
    with pytest.raises(UserError, match=message):
        cache.get_or_build("rows", FACTS | {"size": 4}, write)
    flip(entry / "a")
    with pytest.raises(UserError, match=message):
        cache.get_or_build("rows", FACTS, write)

"""Directories of prepared files that are made once and checked at every use.

In: the facts that decide a content, and a function that writes it. Out: a directory,
whole or absent, shared by all processes; what nobody used for a month is removed.

    FOLDER/KIND-HASH/...              the files, and manifest.json with their SHA-256
    FOLDER/.KIND-HASH.lock            held while the entry is made or checked
    FOLDER/.KIND-HASH.part-*          an entry in the making, or what is left of one
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from halfstep.checkpoint.atomic_directory import MANIFEST, digest, flush
from halfstep.errors import UserError
from halfstep.train.data import file_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DAY = 86400.0  # seconds
_UNUSED = 30 * _DAY
Kind = Literal["rows", "tokens", "characters"]
# The folder may be one that the user keeps other things in.
_ENTRY_NAME = re.compile(
    rf"\.?((?:{'|'.join(get_args(Kind))})-[0-9a-f]{{32}})(\.lock|\.part-[0-9a-f]+)?"
)
# Some systems say one, some the other.
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def folder() -> Path:
    """Return where entries are kept.

    `HALFSTEP_CACHE` names it; without that it is `halfstep/train` in the user's cache.

    Raises:
        UserError: If neither is known.
    """
    given = os.environ.get("HALFSTEP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(given or Path(base, "halfstep", "train")).expanduser().absolute()
    except RuntimeError as error:
        message = "This user has no home folder; set HALFSTEP_CACHE to a folder."
        raise UserError(message) from error


def get_or_build(
    kind: Kind, facts: Mapping[str, object], build: Callable[[Path], None]
) -> Path:
    """Return the directory of some facts, made if it is not there or not whole.

    Why: many processes open the same data at once, any of them may die at any byte,
    and a disk may alter one. An entry is written and flushed under another name and
    renamed in one piece; every byte of it is checked at each use.

    Args:
        kind: What the name of the directory begins with.
        facts: All that decides the content. Json-able.
        build: Writes files into an empty directory. An OSError in it counts as one
            of the folder.

    Returns:
        The directory, whose files are as `build` wrote them.

    Raises:
        UserError: If the folder cannot be written, and does not hold the entry whole.
    """
    plain = json.dumps(facts, sort_keys=True)
    entry = folder() / f"{kind}-{hashlib.sha256(plain.encode()).hexdigest()[:32]}"
    with _writing(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry, shared=True):
            if _fault(entry, json.loads(plain)) is None:
                _touch(entry)
                return entry
        with _lock(entry):
            fault = _fault(entry, json.loads(plain))
            if fault is not None:
                if fault:
                    message = f"{entry} is damaged: {fault}; it is made anew."
                    warnings.warn(message, stacklevel=2)
                _make(entry, json.loads(plain), build)
            _touch(entry)
    _sweep(entry.parent)
    return entry


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Say in one line why the folder cannot be used."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        message = (
            f"{error.filename or place} cannot be written: {reason}; set "
            "HALFSTEP_CACHE to a folder that is yours and has room."
        )
        raise UserError(message) from error


@contextlib.contextmanager
def _lock(entry: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of an entry; say whether it is held."""
    path = entry.with_name(f".{entry.name}.lock")
    while True:
        handle = _open(path, shared=shared)
        if handle is None:
            yield True
            return
        try:
            # Without locks a rename keeps entries whole; some are made twice.
            is_locked = file_lock.lock(handle, shared=shared, wait=wait) is not False
            if not is_locked or file_lock.is_at(handle, path):
                yield is_locked
                return
        finally:
            os.close(handle)


def _open(path: Path, *, shared: bool) -> int | None:
    """Open the file of a lock.

    Why: an entry that is whole can be used where nothing may be written, as in the
    folder of another user. For that its lock is shared, or not needed.

    Returns:
        None if a lock to share is not to be had.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if not shared or error.errno not in _FORBIDDEN:
            raise
    try:
        return os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None


def _fault(entry: Path, facts: object) -> str | None:
    """Return what is wrong with an entry: "" if it is not there, None if nothing."""
    if not os.path.lexists(entry):
        return ""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        if manifest["facts"] != facts:
            return f"{MANIFEST} is not what was written"
        for name, expected in manifest["files"].items():
            if digest(entry / name) != expected:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(error.filename or entry).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not what was written"
    return None


def _make(entry: Path, facts: object, build: Callable[[Path], None]) -> None:
    """Build an entry and put it in its place."""
    part = _temporary_path(entry)
    part.mkdir()
    try:
        build(part)
        written = sorted(part.iterdir())
        manifest = {
            "facts": facts,
            "files": {file.name: digest(file) for file in written},
        }
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*written, part / MANIFEST, part):
            flush(path)
        if os.path.lexists(entry):
            _remove(entry)
        part.rename(entry)
        flush(entry.parent)
    except OSError:
        # Where there are no locks, another process may have been first.
        if _fault(entry, facts) is not None:
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _temporary_path(entry: Path) -> Path:
    """Return a new name for what is not an entry yet, or no longer."""
    return entry.with_name(f".{entry.name}.part-{secrets.token_hex(8)}")


def _remove(entry: Path) -> None:
    """Take an entry away in one piece; who has it open keeps it."""
    part = _temporary_path(entry)
    entry.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def _touch(entry: Path) -> None:
    """Note the use of an entry."""
    # An entry of another user's is used all the same.
    with contextlib.suppress(OSError):
        os.utime(entry / MANIFEST)


def _sweep(place: Path) -> None:
    """Remove what nobody used for a month, and what dead processes left."""
    now = time.time()
    # What vanishes meanwhile is removed by another process; the rest is tried again.
    for path in place.iterdir():
        match = _ENTRY_NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match is None:
                continue
            if path.is_dir() and path.name.startswith("."):
                if now - max(p.stat().st_mtime for p in (path, *path.iterdir())) > _DAY:
                    shutil.rmtree(path)
            elif now - _last_used(place / match[1]) > _UNUSED and _is_cache_entry(
                place / match[1]
            ):
                _remove_if_unused(place / match[1], now)


def _is_cache_entry(entry: Path) -> bool:
    """Say whether a directory is an entry, and does not just look like one.

    What is not there is ours: a lock may outlive its entry.
    """
    if not os.path.lexists(entry):
        return True
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        return isinstance(manifest, dict) and {"facts", "files"} <= manifest.keys()
    except (OSError, ValueError):
        return False


def _last_used(entry: Path) -> float:
    """Return when an entry was used last; 0 if it is not there."""
    try:
        return (entry / MANIFEST).stat().st_mtime
    except FileNotFoundError:
        return entry.stat().st_mtime if entry.exists() else 0.0


def _remove_if_unused(entry: Path, now: float) -> None:
    """Remove an entry and its lock, unless somebody uses them just now."""
    with _lock(entry, wait=False) as is_locked:
        if is_locked and now - _last_used(entry) > _UNUSED:
            if entry.exists():
                _remove(entry)
            entry.with_name(f".{entry.name}.lock").unlink(missing_ok=True)

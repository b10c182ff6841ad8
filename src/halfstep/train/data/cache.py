"""Directories of prepared files that are built once and verified at every use.

In: the facts that decide a content, and a function that writes it. Out: a directory,
whole or absent, shared by all processes. An entry unused for a month is removed.

    FOLDER/KIND-HASH/...              flat arrays, JSON, and manifest.json with SHA-256
    FOLDER/.KIND-HASH.lock            held while the entry is built or removed
    FOLDER/.KIND-HASH.part-*          an entry being built, or left by a killed process
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import filelock
import numpy as np

from halfstep.checkpoint.atomic_directory import MANIFEST, digest, flush
from halfstep.errors import UserError
from halfstep.train.data import file_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_DAY = 86400.0  # seconds
_UNUSED = 30 * _DAY
Kind = Literal["rows", "tokens", "characters"]
# The folder may hold other files of the user.
_ENTRY_NAME = re.compile(
    rf"\.?((?:{'|'.join(get_args(Kind))})-[0-9a-f]{{32}})(\.lock|\.part-[0-9a-f]+)?"
)
_DTYPES = {".utf8": "u1", ".i2": "<i2", ".i4": "<i4", ".i8": "<i8"}
"""Suffix of an array's file -> its numbers, the same on any machine."""


def folder() -> Path:
    """Return where entries are stored.

    `HALFSTEP_CACHE` names it; without that it is `halfstep/train` in the user's cache.

    Raises:
        UserError: If neither is known.
    """
    name = os.environ.get("HALFSTEP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(name or Path(base, "halfstep", "train")).expanduser().absolute()
    except RuntimeError as error:
        message = "This user has no home folder; set HALFSTEP_CACHE to a folder."
        raise UserError(message) from error


def get_or_build(
    kind: Kind, facts: Mapping[str, object], build: Callable[[Path], None]
) -> Path:
    """Return the directory of some facts, built if it is absent or damaged.

    Why: many processes open the same data at once, any of them may die at any byte,
    and a disk may alter one. An entry is written and flushed under another name and
    renamed in one piece; every byte of it is verified at each use. That needs no lock,
    so a folder that cannot be written serves as well.

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
    facts = json.loads(plain)
    entry = folder() / f"{kind}-{hashlib.sha256(plain.encode()).hexdigest()[:32]}"
    _touch(entry)  # first: from now on no other process removes it as unused
    try:
        if _fault(entry, facts) is not None:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with _lock(entry):
                # Another process may have built it meanwhile.
                fault = _fault(entry, facts)
                if fault:
                    message = f"{entry} is damaged: {fault}; it is rebuilt."
                    warnings.warn(message, stacklevel=2)
                if fault is not None:
                    _build(entry, facts, build)
        _remove_unused(entry.parent)
    except OSError as error:
        reason = error.strerror or error
        message = (
            f"{error.filename or entry.parent} cannot be written: {reason}; set "
            "HALFSTEP_CACHE to a writable folder with free space."
        )
        raise UserError(message) from error
    return entry


@contextlib.contextmanager
def _lock(entry: Path, timeout: float = -1) -> Iterator[None]:
    lock = file_lock.acquire(entry.with_name(f".{entry.name}.lock"), timeout)
    try:
        # Without locks a rename keeps entries whole; some are built twice.
        yield
    finally:
        if lock is not None:
            lock.release()


def _fault(entry: Path, facts: object) -> str | None:
    """Return what is wrong with an entry: "" if it is absent, None if nothing."""
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


def _build(entry: Path, facts: object, build: Callable[[Path], None]) -> None:
    """Build an entry under a temporary name and rename it."""
    part = _temporary_path(entry)
    part.mkdir()
    try:
        build(part)
        written = sorted(part.iterdir())
        files = {file.name: digest(file) for file in written}
        manifest = json.dumps({"facts": facts, "files": files}, indent=1)
        (part / MANIFEST).write_text(manifest, encoding="utf-8")
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
    return entry.with_name(f".{entry.name}.part-{secrets.token_hex(8)}")


def _remove(entry: Path) -> None:
    """Remove an entry in one piece; a process that has mapped its files keeps them."""
    part = _temporary_path(entry)
    entry.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def _touch(entry: Path) -> None:
    """Record the use of an entry, where it is there and may be written."""
    with contextlib.suppress(OSError):
        os.utime(entry / MANIFEST)


def _remove_unused(place: Path) -> None:
    """Remove entries unused for a month, and what killed processes left."""
    now = time.time()
    for path in place.iterdir():
        match = _ENTRY_NAME.fullmatch(path.name)
        # An entry in use, or one that another process removes, is left for next time.
        with contextlib.suppress(OSError, filelock.Timeout):
            if match is None:
                continue
            entry = place / match[1]
            if path.is_dir() and path != entry:
                if now - max(p.stat().st_mtime for p in (path, *path.iterdir())) > _DAY:
                    shutil.rmtree(path)
            elif _is_unused(entry, now):
                with _lock(entry, timeout=0):
                    if _is_unused(entry, now):
                        if entry.exists():
                            _remove(entry)
                        entry.with_name(f".{entry.name}.lock").unlink(missing_ok=True)


def _is_unused(entry: Path, now: float) -> bool:
    """Return whether an entry is old, or absent so that only its lock is left.

    What just has the name of an entry is not one.
    """
    if not os.path.lexists(entry):
        return True
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
    except ValueError:
        return False
    is_entry = isinstance(manifest, dict) and {"facts", "files"} <= manifest.keys()
    return is_entry and now - (entry / MANIFEST).stat().st_mtime > _UNUSED


class ArrayWriter(contextlib.ExitStack):
    """Writes flat arrays to the files of a directory, a piece at a time.

    The suffix of a name is the type of the numbers: `starts.i8`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._ends: dict[str, int] = {}

    def append(self, name: str, values: bytes | Sequence[Any] | np.ndarray) -> None:
        """Add numbers, or bytes as they are, to the end of an array."""
        if name not in self._files:
            file = (self._folder / name).open("wb")
            self._files[name] = self.enter_context(file)
        if not isinstance(values, bytes):
            values = np.asarray(values, _DTYPES[Path(name).suffix]).tobytes()
        self._files[name].write(values)

    def append_offsets(self, name: str, sizes: list[int]) -> None:
        """Add where each of the next things begins; the last offset is their end."""
        ends = np.cumsum([self._ends.get(name, 0), *sizes])
        self.append(name, ends[1:] if name in self._ends else ends)
        self._ends[name] = int(ends[-1])


def load_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a directory by name, mapped and not read."""
    return {
        path.stem: _memory_map(path, _DTYPES[path.suffix])
        for path in folder.iterdir()
        if path.suffix in _DTYPES
    }


def _memory_map(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:  # a file without bytes cannot be mapped
        return np.empty(0, dtype)
    # A plain array over the same memory: memmap's own indexing is slow.
    return np.memmap(path, dtype, "r").view(np.ndarray)

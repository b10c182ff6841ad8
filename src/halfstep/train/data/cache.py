"""Caches directories of prepared files: built once, verified at every use.

In: the facts that determine the content, and a function that writes it. Out: a complete
directory, shared by all processes. Entries unused for a month are removed.

    FOLDER/KIND-HASH/...           flat arrays, JSON, and manifest.json with SHA-256
    FOLDER/.KIND-HASH.lock         locked while the entry is built
    FOLDER/.KIND-HASH.part-*       an entry being built, or left by a killed process
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import filelock
import numpy as np

from halfstep.checkpoint import atomic_directory
from halfstep.checkpoint.single import CheckpointError
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_MONTH = 30 * 86400.0  # seconds
_FORMAT = "halfstep cache"
# Deletes only names that match, as the folder may hold other files of the user.
_OURS = re.compile(r"\.?(rows|tokens)-[0-9a-f]{32}(\..+)?")
_DTYPES = {".utf8": "u1", ".i2": "<i2", ".i4": "<i4", ".i8": "<i8"}
"""File suffix -> dtype of the array, with a fixed byte order."""


def folder() -> Path:
    """Return the cache folder.

    That is `HALFSTEP_CACHE`, or `halfstep/train` in the user's cache directory.
    """
    name = os.environ.get("HALFSTEP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(name or Path(base, "halfstep", "train")).expanduser().absolute()
    except RuntimeError as error:
        message = "This user has no home folder; set HALFSTEP_CACHE to a folder."
        raise UserError(message) from error


def get_or_build(
    kind: Literal["rows", "tokens"],
    facts: Mapping[str, object],
    build: Callable[[Path], None],
) -> Path:
    """Return the directory for some facts; build it if absent or damaged.

    Many processes may open the same data at once, any of them may be killed at any
    point, and a disk may corrupt a byte. An intact entry needs no lock and no write, so
    a read-only folder works too.

    `facts` determine the content; `build` writes files into an empty directory, and an
    OSError in it is reported as one of the folder.

    Raises:
        UserError: If there is no intact entry and the folder cannot be written.
    """
    text = json.dumps(facts, sort_keys=True)
    entry = folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    with contextlib.suppress(OSError):
        os.utime(entry)  # done first, so that no other process removes it as unused
    if _is_complete(entry):
        return entry

    def fill(part: Path) -> dict[str, Any]:
        build(part)
        return {"notes": {"facts": facts}}

    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(entry.with_name(f".{entry.name}.lock"))
        try:
            # Another process may have built it in the meantime.
            if not _is_complete(entry):
                if entry.exists():
                    warnings.warn(f"{entry} is damaged; it is rebuilt.", stacklevel=2)
                atomic_directory.write(entry, _FORMAT, fill, replace=True)
        finally:
            if lock is not None:
                lock.release()
        _remove_unused(entry.parent)
    except (OSError, atomic_directory.CheckpointWriteError) as error:
        # Without locks, another process may have finished first.
        if not _is_complete(entry):
            place = getattr(error, "filename", None) or entry.parent
            raise UserError(
                f"{place} cannot be written: {write_fault(error)}; set HALFSTEP_CACHE "
                "to a writable folder with free space."
            ) from error
    return entry


def write_fault(error: Exception) -> str | None:
    """Return the system's reason against writing a file or a checkpoint, or None."""
    if isinstance(error, atomic_directory.CheckpointWriteError):
        return error.reason
    return atomic_directory.os_reason(error)


def _is_complete(entry: Path) -> bool:
    try:
        manifest = atomic_directory.read(entry, _FORMAT)
        atomic_directory.verify(entry, manifest)
    except CheckpointError:
        return False
    return True


def _remove_unused(parent: Path) -> None:
    """Remove entries unused for a month, and old leftovers of killed processes."""
    for path in parent.iterdir():
        with contextlib.suppress(OSError):
            is_old = path.stat().st_mtime < time.time() - _MONTH
            if is_old and _OURS.fullmatch(path.name):
                atomic_directory.discard(path)


class ArrayWriter(contextlib.ExitStack):
    """Appends to flat arrays in the files of a directory.

    The suffix of a file name gives the dtype: `starts.i8`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._ends: dict[str, int] = {}

    def append(self, name: str, values: bytes | Sequence[Any] | np.ndarray) -> None:
        """Append numbers, or raw bytes, to an array."""
        if name not in self._files:
            file = (self._folder / name).open("wb")
            self._files[name] = self.enter_context(file)
        if not isinstance(values, bytes):
            values = np.asarray(values, _DTYPES[Path(name).suffix]).tobytes()
        self._files[name].write(values)

    def append_offsets(self, name: str, sizes: list[int]) -> None:
        """Append the start offset of each item from the sizes, and the end."""
        ends = np.cumsum([self._ends.get(name, 0), *sizes])
        self.append(name, ends[1:] if name in self._ends else ends)
        self._ends[name] = int(ends[-1])


def load_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Memory-map the arrays of a directory, by name."""
    return {
        path.stem: _memory_map(path, _DTYPES[path.suffix])
        for path in folder.iterdir()
        if path.suffix in _DTYPES
    }


def _memory_map(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:  # mmap rejects an empty file
        return np.empty(0, dtype)
    # A plain array view, because indexing a memmap is slow.
    return np.memmap(path, dtype, "r").view(np.ndarray)


def acquire_lock(path: Path, timeout: float = -1) -> filelock.BaseFileLock | None:
    """Create a file if needed and lock it, waiting for other processes.

    filelock's own fallback on network file systems without locks is disabled: it leaves
    a lock file behind when the process is killed.

    Returns:
        The lock, to be released; None if the file system has no locks.

    Raises:
        filelock.Timeout: If another process still holds the lock.
        OSError: If the file cannot be opened for writing.
    """
    lock = filelock.FileLock(path, timeout=timeout, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return lock

"""Locks on files: they end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import filelock

if TYPE_CHECKING:
    from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def acquire(path: Path, timeout: float = -1) -> filelock.BaseFileLock | None:
    """Return the lock of a file, which is created, once no other process holds it.

    Why not only the library: its replacement where a network file system has no locks
    is a file that outlives a killed process.

    Returns:
        The lock, to be released; None where the file system has no locks.

    Raises:
        filelock.Timeout: If another process still holds it.
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

"""Locks files with OS locks, which are released however the process ends."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import filelock

if TYPE_CHECKING:
    from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def acquire(path: Path, timeout: float = -1) -> filelock.BaseFileLock | None:
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

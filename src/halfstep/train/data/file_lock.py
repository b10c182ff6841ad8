"""Locks on open files: they end with the process that holds them, however it ends.

In: an open file. Out: whether it is locked now, or still the one of its name.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from pathlib import Path

# Some systems say one, some the other.
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def lock(handle: int, *, shared: bool = False, wait: bool = True) -> bool | None:
    """Lock an open file.

    Args:
        handle: Of the file.
        shared: Others may share the lock; otherwise nobody.
        wait: For those that hold it now.

    Returns:
        Whether it is locked; None where the system, or a network file system, has no
        locks.
    """
    if sys.platform == "win32":
        return None
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, operation if wait else operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN and not wait:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(handle: int) -> None:
    """Let others lock the file, even while a child that was forked has it open."""
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_UN)


def is_at(handle: int, path: Path) -> bool:
    """Say whether an open file is still the one of a name.

    Why: who waited for a lock may get it on a file that was removed meanwhile; others
    lock the one that has the name now.
    """
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False

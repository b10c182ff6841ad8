"""Who started this process, and whether it works alone.

In: the environment that torchrun sets; a folder. Out: whether torchrun has restarted
its processes, and whether two of them are of one launch; a lock on the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from halfstep.errors import UserError
from halfstep.train.data import file_lock

_PROC = Path("/proc")
_LOCK = ".lock"
_handles: set[int] = set()


def is_restarted() -> bool:
    """Say whether processes of this machine failed, and torchrun has restarted them."""
    return _env_int("TORCHELASTIC_RESTART_COUNT") > 0


def is_restart_of(saved: dict[str, Any] | None) -> bool:
    """Say whether torchrun has started again the launch that a file names.

    Why: an agent counts failures of its own processes alone. It restarts them as well
    where those of another machine fail, and does not say so. But what the same agent
    has begun before, it has started before.

    Args:
        saved: What the file held, of `read_identity`.
    """
    current = identity()
    machines = _env_int("GROUP_WORLD_SIZE")
    uncounted = saved == current and current["run_id"] is not None and machines > 1
    return uncounted or (is_restarted() and is_same_launch(saved, current))


def _env_int(name: str) -> int:
    """Return a number that torchrun sets; 0 where it did not."""
    try:
        return int(os.environ.get(name, "0"))
    except ValueError:
        return 0


def identity() -> dict[str, str | None]:
    """Return what tells this launch from others, for a file.

    Formula: the name of the launch, where torchrun was given one or made one up; the
    machine, and the process there that started this one and would start it again. In
    a container that is always process 1 of one name: where the system tells, also when
    it began, and since which start of the machine that is counted.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    parent = os.getppid()
    return {
        "run_id": None if name in {None, "", "none"} else name,
        "agent": f"{platform.node()} {parent}",
        "agent_began": _began(parent),
        "boot": _read("sys/kernel/random/boot_id"),
    }


def _began(process: int) -> str | None:
    """Return when a process began, in ticks since the machine did."""
    text = _read(f"{process}/stat")
    # The name of the program, in brackets, may hold blanks and brackets itself.
    fields = [] if text is None else text.rpartition(")")[2].split()
    after_name = 22 - 3
    return fields[after_name] if len(fields) > after_name else None


def _read(name: str) -> str | None:
    """Return what the system tells; None where it does not."""
    try:
        return (_PROC / name).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_identity(path: Path) -> dict[str, Any] | None:
    """Return the identity that a file holds; None if it holds none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(saved, dict) and {"run_id", "agent"} <= saved.keys()
    return saved if ours else None


def is_same_launch(
    saved: dict[str, Any] | None, current: dict[str, str | None]
) -> bool:
    """Say whether what a file held is the identity of this launch.

    Formula: one name, and on one machine one starting process; on two machines a name
    must be there. A name alone may be used again by a later launch.
    """
    if saved is None or saved["run_id"] != current["run_id"]:
        return False
    machines = {str(one["agent"]).rpartition(" ")[0] for one in (saved, current)}
    return saved == current or (current["run_id"] is not None and len(machines) > 1)


class FolderLock:
    """A lock on a folder, in which this program alone works until it ends.

    Where the system or the file system knows no locks, nothing is claimed.

    Args:
        folder: Made if it is not there.

    Raises:
        UserError: If another program works in it.
        OSError: If it cannot be written; what was made of it is gone again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None
        self._created: list[Path] = []
        self._names_before: set[str] = set()
        if sys.platform == "win32":
            return
        self._created = [
            each for each in (folder, *folder.parents) if not each.exists()
        ]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._names_before = {path.name for path in folder.iterdir()}
            self._acquire()
        except BaseException:
            self.undo()
            self.release()
            raise

    def _acquire(self) -> None:
        while self._handle is None:
            path = self._folder / _LOCK
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                locked = file_lock.lock(handle, wait=False)
                if locked is None:
                    self._remove_lock_file(path)
                    return
                if not locked:
                    raise _in_use_error(handle, self._folder)
                # Whoever had it may have removed the file while it was opened here.
                if file_lock.is_at(handle, path):
                    self._handle = handle
                    _handles.add(handle)
            except OSError:
                self._remove_lock_file(path)
                raise
            finally:
                if self._handle is None:
                    os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())

    def _remove_lock_file(self, path: Path) -> None:
        """Remove a file that cannot be locked, unless it was there before."""
        if _LOCK not in self._names_before:
            path.unlink()

    def undo(self) -> None:
        """Remove what was made, if nothing else was written since."""
        with contextlib.suppress(OSError):
            now = {path.name for path in self._folder.iterdir()}
            if self._handle in _handles and now - {_LOCK} == self._names_before:
                (self._folder / _LOCK).unlink()
            for path in self._created:
                path.rmdir()

    def release(self) -> None:
        """Let other programs in."""
        if self._handle in _handles:
            _handles.remove(self._handle)
            file_lock.unlock(self._handle)
            os.close(self._handle)


def _in_use_error(handle: int, folder: Path) -> UserError:
    """Return what to say of a folder whose lock another program holds."""
    number = os.read(handle, 32).decode(errors="replace").strip()
    process = f" (process {number})" if number.isdigit() else ""
    return UserError(
        f"{folder} is in use by another program{process}; wait for it, or stop it."
    )


def _close_in_child() -> None:
    """Close the locks in a child.

    Why: a lock lasts as long as any process has the file open, and workers that load
    data outlive a program that is killed by some seconds.
    """
    while _handles:
        os.close(_handles.pop())


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)

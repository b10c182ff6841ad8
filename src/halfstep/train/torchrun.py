"""The launch of this process by torchrun, and the lock on the folder of a run.

In: the environment that torchrun sets; a folder. Out: whether torchrun has restarted
its processes, and whether two of them belong to one launch; a lock on the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import filelock

from halfstep.errors import UserError
from halfstep.train.data import file_lock


def is_restart_of(saved: dict[str, Any] | None) -> bool:
    """Say whether torchrun has started again the launch that a file names.

    Why: an agent counts failures of its own processes alone. It restarts them as well
    where those of another machine fail, and does not say so. But what the same agent
    has begun before, it has started before.

    Args:
        saved: What the file held, of `read_identity`.
    """
    current = identity()
    if saved is None or saved["run_id"] != current["run_id"]:
        return False
    named, same_agent = current["run_id"] is not None, saved == current
    if _env_int("TORCHELASTIC_RESTART_COUNT") > 0:
        # A name alone may be used again by a later launch, but not on two machines.
        hosts = {str(one["agent"]).rpartition(" ")[0] for one in (saved, current)}
        return same_agent or (named and len(hosts) > 1)
    return same_agent and named and _env_int("GROUP_WORLD_SIZE") > 1


def _env_int(name: str) -> int:
    """Return a number that torchrun sets; 0 where it did not."""
    try:
        return int(os.environ.get(name, "0"))
    except ValueError:
        return 0


def identity() -> dict[str, str | None]:
    """Return what distinguishes this launch from others, for a file.

    Formula: the run id, where torchrun was given one or made one up; the machine, and
    the process there that started this one and would restart it. In a container that
    is always process 1 of one name: where the system says, also when it began, and
    since which boot of the machine that is counted.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    parent = os.getppid()
    # The name of the program, in brackets, may hold blanks and brackets itself.
    stat = (_read_proc(f"{parent}/stat") or "").rpartition(")")[2].split()
    return {
        "run_id": None if name in {None, "", "none"} else name,
        "agent": f"{platform.node()} {parent}",
        "agent_began": stat[19] if stat else None,
        "boot": _read_proc("sys/kernel/random/boot_id"),
    }


def _read_proc(name: str) -> str | None:
    """Return what a file of /proc holds; None where there is none."""
    try:
        return Path("/proc", name).read_text(encoding="utf-8", errors="replace").strip()
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


class FolderLock:
    """A lock on a folder, in which this program alone works until it ends.

    Where the system or the file system has no locks, the folder is not locked.

    Args:
        folder: Created if it is absent.

    Raises:
        UserError: If another program works in it.
        OSError: If it cannot be written; what was created of it is removed again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / ".lock"
        self._lock: filelock.BaseFileLock | None = None
        if sys.platform == "win32":
            return
        self._created = [
            each for each in (folder, *folder.parents) if not each.exists()
        ]
        self._names_before: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._names_before = {path.name for path in folder.iterdir()}
            self._lock = file_lock.acquire(self._path, timeout=0)
            if self._lock is not None:
                self._path.write_text(f"{os.getpid()}\n", encoding="utf-8")
            elif self._path.name not in self._names_before:
                self._path.unlink()
        except filelock.Timeout:
            number = self._path.read_text(encoding="utf-8", errors="replace").strip()
            process = f" (process {number})" if number.isdigit() else ""
            message = (
                f"{folder} is in use by another program{process}; wait for it, or "
                "stop it."
            )
            raise UserError(message) from None
        except BaseException:
            self.undo()
            self.release()
            raise

    def undo(self) -> None:
        """Remove what was created, if nothing else was written since."""
        with contextlib.suppress(OSError):
            names = {path.name for path in self._folder.iterdir()}
            if self._lock and names - {self._path.name} == self._names_before:
                self._path.unlink()
            for path in self._created:
                path.rmdir()

    def release(self) -> None:
        """Let other programs in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

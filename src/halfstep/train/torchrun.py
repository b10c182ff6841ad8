"""Whether torchrun has restarted the processes of a launch, from its environment."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def is_restart_of(saved: dict[str, Any] | None) -> bool:
    """Say whether torchrun has started again the launch that a file names.

    Why: an agent counts failures of its own processes alone. It restarts them as well
    where those of another machine fail, and does not say so. But what the same agent
    has begun before, it has started before.
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
    return int(os.environ.get(name, "0"))


def identity() -> dict[str, str | None]:
    """Return what distinguishes this launch from others, for a file.

    That is the run id, where torchrun was given one or made one up; the machine, and
    the process there that started this one and would restart it.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return {
        "run_id": None if name in {None, "", "none"} else name,
        "agent": f"{platform.node()} {os.getppid()}",
    }


def read_identity(path: Path) -> dict[str, Any] | None:
    """Return the identity that a file holds; None if it holds none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(saved, dict) and {"run_id", "agent"} <= saved.keys()
    return saved if ours else None

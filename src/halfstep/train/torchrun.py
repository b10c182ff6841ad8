"""Detects from the environment whether torchrun restarted this launch."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def is_restart_of(saved: dict[str, Any] | None) -> bool:
    """Return whether torchrun restarted the launch whose identity was saved.

    TORCHELASTIC_RESTART_COUNT is not enough: an agent counts failures of its own
    processes only, but also restarts them when those on another machine fail. The same
    agent and run id as saved mean that it has started them before.
    """
    current = identity()
    if saved is None or saved["run_id"] != current["run_id"]:
        return False
    names = ("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE")
    restarts, machines = (int(os.environ.get(name, "0")) for name in names)
    named, same_agent = current["run_id"] is not None, saved == current
    if restarts > 0:
        # A later launch may reuse a run id, but not across two machines.
        hosts = {str(one["agent"]).rpartition(" ")[0] for one in (saved, current)}
        return same_agent or (named and len(hosts) > 1)
    return same_agent and named and machines > 1


def identity() -> dict[str, str | None]:
    """Return what identifies this launch, for `read_identity`.

    That is the run id, if torchrun was given or generated one, and the agent: the
    machine and the parent process, which would restart this one.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return {
        "run_id": None if name in {None, "", "none"} else name,
        "agent": f"{platform.node()} {os.getppid()}",
    }


def read_identity(path: Path) -> dict[str, Any] | None:
    """Return the identity saved in a file; None if it holds none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(saved, dict) and {"run_id", "agent"} <= saved.keys()
    return saved if ours else None

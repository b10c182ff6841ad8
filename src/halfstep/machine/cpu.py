"""Reads the CPU's properties, and how much of it this process may use.

Sources are `/proc`, `/sys` and the environment. Results are plain values, empty if the
system does not provide them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

INSTRUCTION_LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
"""Environment variables that choose instructions. A library reads its own once, at its
first use in a process."""


@functools.cache
def facts() -> dict[str, str]:
    """Return the first processor's fields in `/proc/cpuinfo`, read once per process."""
    source = PROC / "cpuinfo"
    if not source.exists():
        return {}
    fields: dict[str, str] = {}
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def flags(fields: dict[str, str]) -> frozenset[str]:
    """Return the instruction sets of a processor, by Linux's names."""
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def affinity() -> tuple[int, ...]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cgroup_limit() -> float | None:
    """Return the CPU limit of a container in CPUs, or None.

    It is the least quota over period of this process's cgroup and its ancestors.
    """
    try:
        groups = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            if not controllers:
                limits.append(_quota(CGROUPS / folder / "cpu.max"))
            elif "cpu" in controllers.split(","):
                place = CGROUPS / controllers / folder
                limits.append(
                    _quota(place / "cpu.cfs_quota_us", place / "cpu.cfs_period_us")
                )
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(*files: Path) -> float | None:
    """Return quota over period, from one file (cgroup v2) or two (v1)."""
    try:
        words = " ".join(file.read_text(encoding="ascii") for file in files).split()
    except OSError:  # no such cgroup: the controller is not mounted, or hidden
        return None
    quota, period = words[:2]
    return None if quota in ("max", "-1") else int(quota) / int(period)


def instruction_limits() -> dict[str, str]:
    """Return the `INSTRUCTION_LIMITS` that are set now."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.getenv(name)}


def first_instruction_limits() -> dict[str, str]:
    """Return the `INSTRUCTION_LIMITS` that were set when this process started.

    Why: variables set later may or may not have come before the library's first use,
    which cannot be queried.
    """
    try:
        pairs = (PROC / "self" / "environ").read_bytes().split(b"\0")
    except OSError:
        return _AT_IMPORT
    first = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs)
    return {name: first[name] for name in INSTRUCTION_LIMITS if first.get(name)}


_AT_IMPORT = instruction_limits()


def memory(field: str) -> int | None:
    """Return the bytes of a field of `/proc/self/status`: VmRSS, or VmHWM, its peak."""
    status = PROC / "self" / "status"
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def thread_wait_seconds() -> dict[int, float] | None:
    """Return thread id -> seconds that it has waited for a processor; None: unknown."""
    try:
        tasks = list((PROC / "self" / "task").iterdir())
    except OSError:
        return None
    seconds = {}
    for task in tasks:
        try:
            _, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended, or the kernel does not count this
        seconds[int(task.name)] = int(waited) / 1e9
    return seconds or None

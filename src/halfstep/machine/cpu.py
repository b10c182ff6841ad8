"""Reads the CPU's properties, and how much of it this process may use.

Sources are `/proc` and the environment. Results are plain values, empty if the
system does not provide them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

PROC = Path("/proc")

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


def instruction_limits() -> dict[str, str]:
    """Return the `INSTRUCTION_LIMITS` that are set now."""
    return {name: os.environ[name] for name in INSTRUCTION_LIMITS if os.getenv(name)}


def memory(field: str) -> int | None:
    """Return the bytes of a field of `/proc/self/status`: VmRSS, or VmHWM, its peak."""
    status = PROC / "self" / "status"
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None

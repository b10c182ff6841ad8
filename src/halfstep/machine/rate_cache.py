"""Caches measurements on disk, one file for each set of conditions.

A home directory may be shared by different machines, and many processes may write at
once: each file's name depends on the conditions, and files are replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.machine import cpu
from halfstep.machine.gemm import GemmRates
from halfstep.numerics import formats
from halfstep.reporting import table

MAX_AGE_SECONDS = 30 * 24 * 3600
"""Age after which rates are measured again, because a power limit, a driver or a host
may have changed, which cannot always be detected."""

RATES = "rates"
"""Name of the kind of file that holds `GemmRates`."""

MAX_FILES = 64
"""Largest number of files; the oldest are deleted."""

_PREFIXES = (
    *("ATEN_", "CUBLAS", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_TF32"),
    *("OMP_", "ONEDNN_", "OPENBLAS_"),
)
"""Prefixes of environment variables that change how matrices are multiplied."""


def conditions(device: str, chip: str) -> dict[str, Any]:
    """Return the conditions that rates depend on, as plain values."""
    fields = cpu.facts()
    identity = ("vendor_id", "cpu family", "model", "stepping", "microcode")
    arm = ("CPU implementer", "CPU variant", "CPU part", "CPU revision")
    matmul = torch.backends.cuda.matmul
    return {
        "device": device,
        "chip": chip,
        "host": platform.node(),
        "cpu": {name: fields[name] for name in (*identity, *arm) if name in fields},
        "flags": " ".join(sorted(cpu.flags(fields))),
        "affinity": list(cpu.affinity()),
        "cgroup_limit": cpu.cgroup_limit(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES)
        },
        "torch": torch.__version__,
        # Libraries and their versions, active instruction sets, threads of each.
        "build": torch.__config__.show() + torch.__config__.parallel_info(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "fp32_precision": [
            torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
            matmul.fp32_precision,
        ],
        "fp16_accumulation": bool(getattr(matmul, "allow_fp16_accumulation", False)),
    }


def folder(kind: str = RATES) -> Path:
    """Return the directory of the files: `halfstep/<kind>` in the user's cache.

    Raises:
        OSError: If this user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "halfstep" / kind
    except RuntimeError as error:
        raise OSError("this user has no home folder; set XDG_CACHE_HOME") from error


def load(facts: dict[str, Any], now: float) -> GemmRates | None:
    """Return the rates measured under these conditions, or None.

    A file that is damaged, too old, or for other conditions counts as absent.
    """
    try:
        data = read(RATES, facts)
        rates = GemmRates(
            rates={name: float(data["rates"][name]) for name in formats.FORMATS},
            spread={name: float(data["spread"][name]) for name in formats.FORMATS},
            waited=float(data["waited"]),
            time=float(data["time"]),
        )
    except (ValueError, TypeError, LookupError):
        return None
    is_fresh = 0 <= now - rates.time <= MAX_AGE_SECONDS
    is_positive = all(0 < rate < math.inf for rate in rates.rates.values())
    is_share = all(0 <= part <= 1 for part in (*rates.spread.values(), rates.waited))
    return rates if is_fresh and is_positive and is_share else None


def save(facts: dict[str, Any], rates: GemmRates) -> None:
    """Cache rates for later processes.

    Raises:
        OSError: If the directory cannot be written.
    """
    fields = asdict(rates)
    write(RATES, facts, {n: fields[n] for n in ("rates", "spread", "waited", "time")})


def read(kind: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the cached entry of a kind for these conditions, or {}.

    A file that is damaged, or for other conditions, counts as absent.
    """
    try:
        file = _file(kind, facts)
        if not file.is_file():  # reading a pipe could block forever
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
    # JSON that is nested too deeply raises RecursionError.
    except (OSError, ValueError, RecursionError):
        return {}
    is_same = isinstance(data, dict) and data.get("conditions") == facts
    return data if is_same else {}


def write(kind: str, facts: dict[str, Any], entry: dict[str, Any]) -> None:
    """Cache an entry for later processes.

    Raises:
        OSError: If the directory cannot be written.
    """
    file = _file(kind, facts)
    file.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(file, json.dumps(entry | {"conditions": facts}, indent=1))
    _prune(file.parent)


def _file(kind: str, facts: dict[str, Any]) -> Path:
    plain = json.dumps(facts, sort_keys=True)
    return folder(kind) / f"{hashlib.sha256(plain.encode()).hexdigest()[:32]}.json"


def _prune(place: Path) -> None:
    """Delete the oldest files beyond `MAX_FILES`."""
    ages = []
    for file in place.iterdir():
        try:
            ages.append((file.stat().st_mtime, file))
        except FileNotFoundError:
            continue  # another process has deleted it
    for _, file in sorted(ages, reverse=True)[MAX_FILES:]:
        file.unlink(missing_ok=True)

"""Caches measurements on disk, one file for each key.

A home directory may be shared by different machines, and many processes may write at
once: each file's name depends on the key, and files are replaced atomically.
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
"""Period after which rates are measured again, because a power limit, a driver or a
host may have changed, which cannot always be detected."""

RATES = "rates"
"""Name of the kind of file that holds `GemmRates`."""

MAX_FILES = 64
"""Largest number of files; the oldest are deleted."""

_PREFIXES = (
    *("ATEN_", "CUBLAS", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_TF32"),
    *("OMP_", "ONEDNN_", "OPENBLAS_"),
)
"""Prefixes of environment variables that change how matrices are multiplied."""


def key(device: str, chip: str, now: float) -> str:
    """Return what measurements depend on, in a line: conditions, and the month."""
    matmul: Any = (
        torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    ).matmul
    variables = sorted(
        pair for pair in os.environ.items() if pair[0].startswith(_PREFIXES)
    )
    parts = (
        *(device, chip, platform.node(), " ".join(sorted(cpu.flags(cpu.facts())))),
        *(torch.__version__, torch.backends.cpu.get_cpu_capability()),
        *(torch.get_num_threads(), matmul.fp32_precision, int(now // MAX_AGE_SECONDS)),
        *(f"{name}={value}" for name, value in variables),
    )
    return "; ".join(map(str, parts))


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


def load(key: str) -> GemmRates | None:
    """Return the rates measured under these conditions, or None.

    A file that is damaged, or for other conditions, counts as absent.
    """
    try:
        data = read(RATES, key)
        rates = GemmRates(
            rates={name: float(data["rates"][name]) for name in formats.FORMATS},
            spread={name: float(data["spread"][name]) for name in formats.FORMATS},
            waited=float(data["waited"]),
            time=float(data["time"]),
        )
    except (ValueError, TypeError, LookupError):
        return None
    return rates if all(0 < r < math.inf for r in rates.rates.values()) else None


def save(key: str, rates: GemmRates) -> None:
    """Cache rates for later processes.

    Raises:
        OSError: If the directory cannot be written.
    """
    fields = asdict(rates)
    write(RATES, key, {n: fields[n] for n in ("rates", "spread", "waited", "time")})


def read(kind: str, key: str) -> dict[str, Any]:
    """Return the cached entry of a kind for a key, or {}.

    A file that is damaged, or for another key, counts as absent.
    """
    try:
        file = _file(kind, key)
        if not file.is_file():  # reading a pipe could block forever
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
    # JSON that is nested too deeply raises RecursionError.
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) and data.get("key") == key else {}


def write(kind: str, key: str, entry: dict[str, Any]) -> None:
    """Cache an entry for later processes.

    Raises:
        OSError: If the directory cannot be written.
    """
    file = _file(kind, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(file, json.dumps(entry | {"key": key}, indent=1))
    _prune(file.parent)


def _file(kind: str, key: str) -> Path:
    return folder(kind) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


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

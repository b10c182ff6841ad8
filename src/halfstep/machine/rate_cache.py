"""Caches measurements on disk, one file for each key.

A home directory may be shared by different machines, and many processes may write at
once: each file's name depends on the key, and files are replaced atomically.
"""

from __future__ import annotations

import contextlib
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


def key(device: str, chip: str, now: float) -> str:
    """Return what measurements depend on, in a line: conditions, and the month.

    The host, as a home directory may be shared; and what torch may use of the chip.
    """
    matmul: Any = (
        torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    ).matmul
    parts = (
        *(device, chip, platform.node(), torch.__version__, torch.get_num_threads()),
        *(torch.backends.cpu.get_cpu_capability(), matmul.fp32_precision),
        *(cpu.instruction_limits(), int(now // MAX_AGE_SECONDS)),
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
    """Return the rates measured under these conditions, or None."""
    try:
        entry = read(RATES, key)
        del entry["key"]
        rates = GemmRates(**entry)
        values = [rates.rates[name] for name in formats.FORMATS]
        is_valid = all(0 < value < math.inf for value in values) and rates.time > 0
    except (TypeError, LookupError, AttributeError):
        return None
    return rates if is_valid else None


def save(key: str, rates: GemmRates) -> None:
    """Cache rates for later processes.

    Raises:
        OSError: If the directory cannot be written.
    """
    write(RATES, key, asdict(rates))


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
    # Another process may delete some meanwhile.
    with contextlib.suppress(FileNotFoundError):
        files = sorted(place.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink()

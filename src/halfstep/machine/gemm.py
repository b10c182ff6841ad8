"""Measures matmul rates in rounds, with their spread."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUNDS = 3


@dataclass(frozen=True)
class GemmRates:
    """Measured matmul rates, and how far they vary."""

    rates: Mapping[str, float]
    """Format -> TFLOP/s of the fastest round."""
    spread: Mapping[str, float]
    """Format -> difference between the slowest and the fastest round, relative to the
    fastest, 0 to 1."""
    time: float = 0.0
    """When it was measured, in seconds since 1970."""
    why_not_cached: str = ""
    """Why other processes must measure again; empty if the rates are cached."""


def measure(device: str) -> GemmRates:
    """Measure the matmul rate of each format.

    Why in rounds: a slow moment then affects all formats, not one.
    """
    dtypes = {name: format_.dtype for name, format_ in formats.FORMATS.items()}
    sizes = {name: gemm_size(dtype, device) for name, dtype in dtypes.items()}
    rounds = [
        {name: gemm_rate(dtype, device, sizes[name]) for name, dtype in dtypes.items()}
        for _ in range(ROUNDS)
    ]
    fastest = {name: max(each[name] for each in rounds) for name in dtypes}
    slowest = {name: min(each[name] for each in rounds) for name in dtypes}
    spread = {name: 1 - slowest[name] / fastest[name] for name in dtypes}
    return GemmRates(fastest, spread, time=time.time())


_SMALLEST, _LARGEST, _LARGEST_ON_CPU = 256, 4096, 1024
_LEAST_CALLS, _LONG_CALL = 3, 0.1
"""At least `_LEAST_CALLS` matmuls are timed, unless one takes over `_LONG_CALL` s."""
_RATE_SECONDS = 0.05
"""Time to spend on a rate, if three matmuls fit it: about sixty matmuls of the fastest
format on a 2-core machine."""


def gemm_size(dtype: torch.dtype, device: str) -> int:
    """Return the largest size whose matmul takes no more than `_LONG_CALL` seconds.

    The size doubles while the next one is expected to fit, because a format that the
    CPU emulates must not take minutes. The small matmuls also warm up.
    """
    size = _SMALLEST
    largest = _LARGEST_ON_CPU if device == "cpu" else _LARGEST
    while size < largest:
        if 8 * min(_times(dtype, device, size, 0.0)) > _LONG_CALL:
            break
        size *= 2
    return size


def gemm_rate(dtype: torch.dtype, device: str, size: int) -> float:
    """Return the rate of a square matmul, in TFLOP/s.

    Formula: 2 n**3 operations over the shortest time of one matmul.
    """
    return 2 * size**3 / min(_times(dtype, device, size, _RATE_SECONDS)) / 1e12


def _times(dtype: torch.dtype, device: str, size: int, seconds: float) -> list[float]:
    """Return the seconds of single matmuls, without the first, which warms up."""
    # Time that the thread waited for a CPU is unrelated to the format.
    on_linux = device == "cpu" and sys.platform == "linux"
    clock = time.thread_time if on_linux else time.perf_counter
    left = torch.ones(size, size, dtype=dtype, device=device)
    times: list[float] = []
    left @ left
    while True:
        synchronize(device)
        began = clock()
        left @ left
        synchronize(device)
        times.append(clock() - began)
        enough = len(times) >= _LEAST_CALLS or times[-1] > _LONG_CALL
        if enough and sum(times) >= seconds:
            return times


def synchronize(device: str) -> None:
    """Wait until all work on a device is done."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()

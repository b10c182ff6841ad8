"""Measures matmul rates in rounds, with their spread, and checks for other load.

In: a device. Out: `GemmRates`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.machine import cpu
from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROUNDS = 3

SPREAD = 0.2
"""Largest relative difference between rounds that counts as noise. An estimate: on idle
virtual machines rounds differ by up to a tenth."""

WAITED = 0.1
"""Largest share of the time that a thread may have waited for a CPU. On an idle machine
it is below 0.02; one other busy process makes it 0.5."""


@dataclass(frozen=True)
class GemmRates:
    """Measured matmul rates, and how reliable they are."""

    rates: Mapping[str, float]
    """Format -> TFLOP/s of the fastest round."""
    spread: Mapping[str, float]
    """Format -> difference between the slowest and the fastest round, relative to the
    fastest, 0 to 1."""
    waited: float
    """Share of the time that a thread waited for a CPU, 0 to 1; maximum over
    threads."""
    doubt: str = ""
    """Why the numbers may be wrong; empty if there is no reason."""
    time: float = 0.0
    """When it was measured, in seconds since 1970."""
    why_not_cached: str = ""
    """Why other processes must measure again; empty if the rates are cached."""


def measure(device: str) -> GemmRates:
    """Measure the matmul rate of each format.

    Why in rounds: a slow moment then affects all formats, not one.
    """
    share = count_waiting()
    dtypes = {name: format_.dtype for name, format_ in formats.FORMATS.items()}
    # Small matmuls often end before a context switch disturbs them.
    sizes = {n: {_SMALLEST, gemm_size(t, device)} for n, t in dtypes.items()}
    rounds = [
        {
            name: max(gemm_rate(dtype, device, size) for size in sizes[name])
            for name, dtype in dtypes.items()
        }
        for _ in range(ROUNDS)
    ]
    fastest = {name: max(each[name] for each in rounds) for name in dtypes}
    spread = {
        name: 1 - min(each[name] for each in rounds) / top
        for name, top in fastest.items()
    }
    waited, worst, doubt = share(), max(spread.values()), ""
    if waited > WAITED:
        doubt = f"threads waited {waited:.0%} of the time for a CPU"
    elif worst > SPREAD:
        doubt = f"rounds differ by {worst:.0%}"
    return GemmRates(fastest, spread, waited, doubt)


def count_waiting() -> Callable[[], float]:
    """Start a measurement; return a function for the share of time threads have waited.

    If the system does not count waiting, it is estimated from the load average: per
    second, a thread waits for the load in excess of the number of CPUs.
    """
    before, began = cpu.thread_wait_seconds(), time.perf_counter()

    def share() -> float:
        after, seconds = cpu.thread_wait_seconds(), time.perf_counter() - began
        if before is None or after is None:
            if not hasattr(os, "getloadavg"):
                return 0.0
            return max(0.0, 1 - len(cpu.affinity()) / max(os.getloadavg()[0], 1e-9))
        longest = max(waited - before.get(task, 0.0) for task, waited in after.items())
        return min(1.0, longest / seconds)

    return share


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

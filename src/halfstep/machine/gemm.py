"""Rates of matrix products: measured in rounds, with a spread, and not under load.

In: a device. Out: `GemmRates`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from halfstep.machine import cpu
from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROUNDS, ATTEMPTS = 3, 3

SPREAD = 0.2
"""Largest difference between rounds, over the fastest, that is taken for noise. A
guess: on idle virtual machines rounds differ by up to a tenth."""

WAITED = 0.1
"""Largest share of the time that a thread may have waited for a processor. On an idle
machine it is below 0.02; one other program that computes makes it 0.5."""


@dataclass(frozen=True)
class GemmRates:
    """Measured matmul rates, and how reliable they are."""

    rates: Mapping[str, float]
    """Format -> TFLOP/s of the fastest round."""
    spread: Mapping[str, float]
    """Format -> difference between the slowest and the fastest round, relative to the
    fastest, 0 to 1."""
    waited: float
    """Share of the time that a thread waited for a processor, 0 to 1; of the thread
    that waited most."""
    doubt: str = ""
    """Why the numbers may be wrong; empty if there is no reason."""
    time: float = 0.0
    """When it was measured, in seconds since 1970."""
    why_not_cached: str = ""
    """Why other processes measure again; empty if it is cached."""


def measure(
    device: str,
    *,
    rate: Callable[..., float] | None = None,
    size: Callable[..., int] | None = None,
    load: Callable[[], Callable[[], float]] | None = None,
) -> GemmRates:
    """Measure the matrix products of each format, again while the machine is busy.

    Why in rounds: a slow moment meets all formats and not one. If all of `ATTEMPTS`
    were under load, rates on a CPU come from the time that the calling thread computed
    instead: what it waited for a processor says nothing of formats.

    Args:
        device: "cpu", "cuda", "mps" or "xpu".
        rate: `gemm_rate`, or what is called like it.
        size: `gemm_size`, or what is called like it.
        load: Starts a count; what it returns gives the share of the time since that
            threads waited. Default `waiting`.

    Returns:
        Rates; their `doubt` is empty unless all attempts were under load.
    """
    rate, size, load = rate or gemm_rate, size or gemm_size, load or count_waiting
    dtypes = {name: format_.dtype for name, format_ in formats.FORMATS.items()}
    for _ in range(ATTEMPTS):
        share = load()
        sizes = {name: size(dtype, device) for name, dtype in dtypes.items()}
        rounds: list[dict[str, float]] = []
        while len(rounds) < ROUNDS and share() <= WAITED:
            rounds.append({n: rate(t, device, sizes[n]) for n, t in dtypes.items()})
        waited = share()
        if waited > WAITED:
            doubt = f"threads waited {waited:.0%} of the time for a CPU"
            continue
        summary = _summary(rounds, waited)
        worst = max(summary.spread.values())
        if worst <= SPREAD:
            return summary
        doubt = f"rounds differ by {worst:.0%}"
    clock = time.thread_time if device == "cpu" else time.perf_counter
    # A product that ends before the processor changes hands is the least disturbed.
    both = {n: {_SMALLEST, size(t, device, clock=clock)} for n, t in dtypes.items()}
    rounds = [
        {
            n: max(rate(t, device, each, clock=clock) for each in both[n])
            for n, t in dtypes.items()
        }
        for _ in range(2)  # a spread, at the least cost to whatever else runs
    ]
    return replace(_summary(rounds, waited), doubt=doubt)


def _summary(rounds: Sequence[Mapping[str, float]], waited: float) -> GemmRates:
    by_format = {name: [each[name] for each in rounds] for name in rounds[0]}
    fastest = {name: max(rates) for name, rates in by_format.items()}
    spread = {name: 1 - min(by_format[name]) / top for name, top in fastest.items()}
    return GemmRates(fastest, spread, waited)


def count_waiting() -> Callable[[], float]:
    """Start to count; return what tells the share of the time since.

    Where the system does not count how long threads wait, the load average stands in:
    of each second, a thread waits what exceeds the processors there are.
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
"""As many products are timed, unless one alone takes longer than these seconds."""


def gemm_size(
    dtype: torch.dtype,
    device: str,
    *,
    seconds: float = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the largest size whose products take no more than a given time.

    It doubles while a product of the next size is expected to fit: a format
    that the processor emulates must not take minutes. Small products are also what
    warms the machine up.

    Args:
        dtype: Dtype of both factors.
        device: "cpu", "cuda", "mps" or "xpu".
        seconds: Longest time of one product. Default 0.1.
        clock: Tells the time in seconds.
    """
    size = _SMALLEST
    largest = _LARGEST_ON_CPU if device == "cpu" else _LARGEST
    while size < largest:
        if 8 * min(_times(dtype, device, size, 0.0, clock)) > seconds:
            break
        size *= 2
    return size


def gemm_rate(
    dtype: torch.dtype,
    device: str,
    size: int,
    *,
    seconds: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the rate of a square matrix product, in TFLOP/s.

    Formula: 2 n**3 operations over the shortest time of one product.

    Args:
        dtype: Dtype of both factors.
        device: "cpu", "cuda", "mps" or "xpu".
        size: n.
        seconds: Time to spend, if three products fit it. Default 0.05: some sixty
            products of the fastest format on a 2-core machine.
        clock: Tells the time in seconds.
    """
    return 2 * size**3 / min(_times(dtype, device, size, seconds, clock)) / 1e12


def _times(
    dtype: torch.dtype,
    device: str,
    size: int,
    seconds: float,
    clock: Callable[[], float],
) -> list[float]:
    """Return the seconds of single products; the first, which warms up, is left out."""
    left = torch.ones(size, size, dtype=dtype, device=device)
    times: list[float] = []
    left @ left
    while True:
        _wait(device)
        began = clock()
        left @ left
        _wait(device)
        times.append(clock() - began)
        enough = len(times) >= _LEAST_CALLS or times[-1] > _LONG_CALL
        if enough and sum(times) >= seconds:
            return times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()

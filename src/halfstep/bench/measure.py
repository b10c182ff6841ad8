"""Times candidates in turn, and states ratios with their spread."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from halfstep.bench import journal
from halfstep.machine import gemm
from halfstep.reporting.table import Cell, Table, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MIB = 2**20
SPREAD = "+-: half of the rounds lie as near to the ratio"
NO_DIFFERENCE = "no difference beyond the spread"
MIN_ROUNDS = 3
"""Rounds below which nothing is called faster or slower: quartiles need three."""

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Times of candidates, round by round; results for those not run are None.

    A slow period of the machine affects all candidates of a round. So ratios and
    differences are taken within a round, and then the median.
    """

    rounds: Mapping[str, Sequence[float]]
    """Candidate -> seconds of each round; equally many for each."""

    def median(self, name: str, unit: float = 1.0) -> float | None:
        """Return a candidate's median time; `unit` is the number of them per second."""
        return median([unit * each for each in self.rounds.get(name, ())])

    def ratio(self, name: str, baseline: str) -> float | None:
        """Return the median of a candidate's time over the baseline's."""
        return median(self._ratios(name, baseline))

    def spread(self, name: str, baseline: str) -> float | None:
        """Return half of the interquartile range of the ratios."""
        ratios = self._ratios(name, baseline)
        return half_quartile_range(ratios) if ratios else None

    def result(self, name: str, baseline: str) -> str | None:
        """Return "faster" or "slower" than the baseline, or `NO_DIFFERENCE`.

        None for the baseline itself, and with fewer than `MIN_ROUNDS` rounds.
        """
        ratios = self._ratios(name, baseline)
        if name == baseline or len(ratios) < MIN_ROUNDS:
            return None
        return verdict(statistics.median(ratios) - 1, half_quartile_range(ratios))

    def _ratios(self, name: str, baseline: str) -> list[float]:
        if name not in self.rounds or baseline not in self.rounds:
            return []
        pairs = zip(self.rounds[name], self.rounds[baseline], strict=True)
        return [own / other for own, other in pairs]


def verdict(
    difference: float | None,
    spread: float | None,
    less: str = "faster",
    more: str = "slower",
) -> str | None:
    """Return a word for the sign; `NO_DIFFERENCE` if 0 is within the spread."""
    if difference is None or spread is None:
        return None
    if abs(difference) <= spread:
        return NO_DIFFERENCE
    return less if difference < 0 else more


def median(values: Sequence[float]) -> float | None:
    """Return the median; None if empty."""
    return statistics.median(values) if values else None


def half_quartile_range(values: Sequence[float]) -> float:
    """Return half of the interquartile range of at least one value."""
    if len(values) == 1:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def table(
    title: str,
    rows: Sequence[Mapping[str, Cell]],
    notes: Iterable[str],
    digits: int = 3,
) -> Table:
    """Build a table from rows of column -> cell; all have the same columns."""
    cells = tuple(tuple(row.values()) for row in rows)
    return Table(title, tuple(rows[0]), cells, tuple(notes), digits=digits)


def take_turns(candidates: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Measure candidates in turn, functions that run a turn and return its seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in order(candidates, number):
            seconds[name].append(candidates[name]())
            journal.record(name, round=number + 1, seconds=seconds[name][-1])
    return Times(seconds)


def order(names: Iterable[str], number: int) -> list[str]:
    """Return the order of a round; every second one is reversed.

    The second candidate benefits from warm caches, or suffers from a hot CPU.
    """
    ordered = list(names)
    return ordered[::-1] if number % 2 else ordered


def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Return a call's result, and its seconds until the device is done.

    Wall time also on a GPU, as time in which it waits for the host counts.
    """
    gemm.synchronize(device)
    start = time.perf_counter()
    result = call()
    gemm.synchronize(device)
    return result, time.perf_counter() - start


def in_turn(rounds: int) -> str:
    """Return the note on how a table's times were taken."""
    return f"median of {format_count(rounds, 'round')}, candidates in turn; {SPREAD}"


def progress(line: str) -> None:
    """Print a progress line to standard error."""
    print(line, file=sys.stderr, flush=True)

"""Times of contenders that take turns, and the conditions they were taken under.

In: calls and a device. Out: seconds round by round, with their medians, ratios and
differences; rows and notes for the table.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import timeit
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import torch

from halfstep.bench import journal
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

MIB = 2**20
SPREAD = "+-: half of the rounds lie as near to the ratio"
TURN_SECONDS = 0.05
"""A turn has lasted long enough after that, whatever --calls says."""

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """What contenders took, round by round; None of one that did not run.

    Why: a slow minute of the machine meets all contenders of one round. So ratios and
    differences are taken within a round, and the median comes last.
    """

    rounds: Mapping[str, Sequence[float]]
    """Contender -> seconds of each round, in order; as many for each."""

    def median(self, name: str, unit: float = 1.0) -> float | None:
        """Return a contender's time in units, of which a second has so many."""
        return median([unit * each for each in self.rounds.get(name, ())])

    def ratio(self, name: str, baseline: str) -> float | None:
        """Return a contender's time over that of a baseline."""
        return median(self._ratios(name, baseline))

    def spread(self, name: str, baseline: str) -> float | None:
        """Return how far the ratios lie apart: half the width of their middle half."""
        ratios = self._ratios(name, baseline)
        if len(ratios) <= 1:
            return 0.0 if ratios else None
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / 2

    def excess(self, name: str, baseline: str, unit: float = 1.0) -> float | None:
        """Return by how much a contender takes longer than a baseline, in units."""
        pairs = self._pairs(name, baseline)
        return median([unit * (own - other) for own, other in pairs])

    def _ratios(self, name: str, baseline: str) -> list[float]:
        return [own / other for own, other in self._pairs(name, baseline)]

    def _pairs(self, name: str, baseline: str) -> list[tuple[float, float]]:
        if name not in self.rounds or baseline not in self.rounds:
            return []
        return list(zip(self.rounds[name], self.rounds[baseline], strict=True))


def median(values: Sequence[float]) -> float | None:
    """Return the median; None of none."""
    return statistics.median(values) if values else None


def within(value: float | None, limit: float | None) -> bool | None:
    """Say whether a value is at most a limit; None where there is none of either."""
    return None if value is None or limit is None else value <= limit


def table(
    title: str,
    rows: Sequence[Mapping[str, Cell]],
    notes: Iterable[str],
    digits: int = 3,
) -> Table:
    """Return a table of rows, each from column to cell; all have the same columns."""
    cells = tuple(tuple(row.values()) for row in rows)
    return Table(title, tuple(rows[0]), cells, tuple(notes), digits=digits)


def take_turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int, what: str = ""
) -> Times:
    """Measure contenders in turn.

    Args:
        contenders: Name -> what takes one turn and returns its seconds.
        rounds: Turns of each, >= 1.
        what: What they all do, for the journal, where a bench measures several things.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in order(contenders, number):
            seconds[name].append(contenders[name]())
            title = f"{what}: {name}" if what else name
            journal.record(title, round=number + 1, seconds=seconds[name][-1])
    return Times(seconds)


def order(names: Iterable[str], number: int) -> list[str]:
    """Return the order of a round: every second one runs backwards.

    Why: the second contender finds warm caches, or a hot processor.
    """
    ordered = list(names)
    return ordered[::-1] if number % 2 else ordered


def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Return what a call returns, and its seconds until the device is done too.

    It is wall time, on a GPU as well: waiting for the processor is time lost.
    """
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def per_call(call: Callable[[], object], calls: int, device: str) -> float:
    """Return the seconds of one call, of microseconds or more, among many in a row."""
    loop = timeit.Timer(call)  # no garbage collection, and next to no loop
    return timed(lambda: loop.timeit(calls), device)[1] / calls


def calls_per_turn(calls: int, seconds: float) -> int:
    """Return how many calls, each of some seconds, make a turn: at most `calls`."""
    return max(1, min(calls, int(TURN_SECONDS / seconds)))


def synchronize(device: str) -> None:
    """Wait until a device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def pick_device(name: str | None) -> str:
    """Return the device that a flag means; None: cuda where there is one.

    Raises:
        UserError: If cuda is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device here; use --device cpu."
        raise UserError(message)
    return name or hardware.capabilities().device


def from_flags(
    kind: Callable[..., T], arguments: argparse.Namespace, **others: object
) -> T:
    """Return a dataclass whose fields are flags, but for those that are given."""
    names = {field.name for field in fields(kind)} - others.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names}, **others)


def in_turn(rounds: int) -> str:
    """Return the note on what a table's times are."""
    return f"median of {rounds} rounds, contenders in turn"


def conditions(bench: str, device: str, arguments: argparse.Namespace) -> list[str]:
    """Return the notes that every table needs: when, where, and how to repeat it."""
    facts = hardware.capabilities()
    processor = facts.gpus[0].name if device == "cuda" else facts.cpu
    today = time.strftime("%Y-%m-%d")
    threads = torch.get_num_threads()  # now: a flag may have changed it
    notes = [
        f"{today}, torch {facts.torch}, {processor}, threads: {threads}",
        f"halfstep bench {bench} {_flags(arguments)} --device {device}",
    ]
    tunables = os.environ.get("GLIBC_TUNABLES")
    return notes + ([f"GLIBC_TUNABLES={tunables}"] if tunables else [])


def _flags(arguments: argparse.Namespace) -> str:
    """Spell every setting as a flag, defaults too: they may change."""
    words = []
    for name, value in vars(arguments).items():
        if name not in {"command", "tables", "device", "json"} and value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name.replace('_', '-')} {text}")
    return " ".join(words)


def progress(line: str) -> None:
    """Print how far the bench is."""
    print(line, file=sys.stderr, flush=True)

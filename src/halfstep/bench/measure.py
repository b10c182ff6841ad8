"""Times contenders in turn, and describes the conditions of the measurements."""

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
"""Minimum duration of a turn, after which it may end before --calls calls."""

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Times of contenders, round by round; results for those not run are None.

    A slow period of the machine affects all contenders of a round. So ratios and
    differences are taken within a round, and then the median.
    """

    rounds: Mapping[str, Sequence[float]]
    """Contender -> seconds of each round; equally many for each."""

    def median(self, name: str, unit: float = 1.0) -> float | None:
        """Return a contender's median time; `unit` is the number of them per second."""
        return median([unit * each for each in self.rounds.get(name, ())])

    def ratio(self, name: str, baseline: str) -> float | None:
        """Return the median of a contender's time over the baseline's."""
        return median(self._ratios(name, baseline))

    def spread(self, name: str, baseline: str) -> float | None:
        """Return half of the interquartile range of the ratios."""
        ratios = self._ratios(name, baseline)
        if len(ratios) <= 1:
            return 0.0 if ratios else None
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / 2

    def excess(self, name: str, baseline: str, unit: float = 1.0) -> float | None:
        """Return the median difference to a baseline; `unit` as in `median`."""
        pairs = self._pairs(name, baseline)
        return median([unit * (own - other) for own, other in pairs])

    def _ratios(self, name: str, baseline: str) -> list[float]:
        return [own / other for own, other in self._pairs(name, baseline)]

    def _pairs(self, name: str, baseline: str) -> list[tuple[float, float]]:
        if name not in self.rounds or baseline not in self.rounds:
            return []
        return list(zip(self.rounds[name], self.rounds[baseline], strict=True))


def median(values: Sequence[float]) -> float | None:
    """Return the median; None if empty."""
    return statistics.median(values) if values else None


def within(value: float | None, limit: float | None) -> bool | None:
    """Return whether a value is at most a limit; None if either is None."""
    return None if value is None or limit is None else value <= limit


def table(
    title: str,
    rows: Sequence[Mapping[str, Cell]],
    notes: Iterable[str],
    digits: int = 3,
) -> Table:
    """Build a table from rows of column -> cell; all have the same columns."""
    cells = tuple(tuple(row.values()) for row in rows)
    return Table(title, tuple(rows[0]), cells, tuple(notes), digits=digits)


def take_turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int, what: str = ""
) -> Times:
    """Measure contenders in turn.

    Args:
        contenders: Name -> function that runs one turn and returns its seconds.
        rounds: Turns per contender, >= 1.
        what: Description for the journal, if a bench measures several things.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in order(contenders, number):
            seconds[name].append(contenders[name]())
            title = f"{what}: {name}" if what else name
            journal.record(title, round=number + 1, seconds=seconds[name][-1])
    return Times(seconds)


def order(names: Iterable[str], number: int) -> list[str]:
    """Return the order of a round; every second one is reversed.

    The second contender benefits from warm caches, or suffers from a hot CPU.
    """
    ordered = list(names)
    return ordered[::-1] if number % 2 else ordered


def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Return a call's result, and its seconds until the device is done.

    Wall time also on a GPU, as time in which it waits for the host counts.
    """
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def per_call(call: Callable[[], object], calls: int, device: str) -> float:
    """Return the seconds per call over many calls, each of microseconds or more."""
    loop = timeit.Timer(call)  # no garbage collection, minimal loop overhead
    return timed(lambda: loop.timeit(calls), device)[1] / calls


def calls_per_turn(calls: int, seconds: float) -> int:
    """Return the number of calls per turn, given seconds per call: at most `calls`."""
    return max(1, min(calls, int(TURN_SECONDS / seconds)))


def synchronize(device: str) -> None:
    """Wait until all work on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def pick_device(name: str | None) -> str:
    """Resolve a --device flag; None: cuda if available.

    Raises:
        UserError: If cuda is requested but not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device here; use --device cpu."
        raise UserError(message)
    return name or hardware.capabilities().device


def from_flags(
    kind: Callable[..., T], arguments: argparse.Namespace, **others: object
) -> T:
    """Build a dataclass from flags of the same names as its fields, and `others`."""
    names = {field.name for field in fields(kind)} - others.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names}, **others)


def in_turn(rounds: int) -> str:
    """Return the note on how a table's times were taken."""
    return f"median of {rounds} rounds, contenders in turn"


def conditions(bench: str, device: str, arguments: argparse.Namespace) -> list[str]:
    """Return the notes of every table: date, machine, and the command to repeat it."""
    facts = hardware.capabilities()
    processor = facts.gpus[0].name if device == "cuda" else facts.cpu
    today = time.strftime("%Y-%m-%d")
    threads = torch.get_num_threads()  # now, as a flag may have changed it
    notes = [
        f"{today}, torch {facts.torch}, {processor}, threads: {threads}",
        f"halfstep bench {bench} {_flags(arguments)} --device {device}",
    ]
    tunables = os.environ.get("GLIBC_TUNABLES")
    return notes + ([f"GLIBC_TUNABLES={tunables}"] if tunables else [])


def _flags(arguments: argparse.Namespace) -> str:
    """Format all settings as flags, defaults too, since those may change."""
    words = []
    for name, value in vars(arguments).items():
        if name not in {"command", "tables", "device", "json"} and value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name.replace('_', '-')} {text}")
    return " ".join(words)


def progress(line: str) -> None:
    """Print a progress line to standard error."""
    print(line, file=sys.stderr, flush=True)

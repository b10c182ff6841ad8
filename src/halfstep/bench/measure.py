"""Times of contenders that take turns, and the conditions they were taken under.

In: calls and a device. Out: seconds round by round, with their medians, ratios and
differences; notes for the table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from halfstep.bench import journal
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

EVAL_ONLY_AT_END = 2**31 - 1
"""Steps between evaluations: the last weights are judged, and no dev text has chosen
them."""

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """What contenders took, round by round.

    Why: a slow minute of the machine meets all contenders of one round. So ratios and
    differences are taken within a round, and the median comes last.
    """

    rounds: Mapping[str, Sequence[float]]
    """Contender -> seconds of each round, in order; as many for each."""

    def median(self, name: str) -> float:
        """Return a contender's seconds."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, baseline: str) -> float:
        """Return a contender's time over that of a baseline."""
        return statistics.median(self._ratios(name, baseline))

    def spread(self, name: str, baseline: str) -> float:
        """Return how far the ratios lie apart: half the width of their middle half."""
        ratios = self._ratios(name, baseline)
        if len(ratios) == 1:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / 2

    def excess(self, name: str, baseline: str) -> float:
        """Return by how many seconds a contender takes longer than a baseline."""
        both = zip(self.rounds[name], self.rounds[baseline], strict=True)
        return statistics.median(own - other for own, other in both)

    def _ratios(self, name: str, baseline: str) -> list[float]:
        both = zip(self.rounds[name], self.rounds[baseline], strict=True)
        return [own / other for own, other in both]


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

    Why: whoever comes second finds warm caches, or a hot processor.
    """
    ordered = list(names)
    return ordered[::-1] if number % 2 else ordered


def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Return what a call returns, and its seconds until the device is done too.

    It is wall time, on a GPU as well: waiting for the processor is time lost.
    """
    synchronize(device)
    began = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - began


def per_call(call: Callable[[], object], calls: int, device: str) -> float:
    """Return the seconds of one call among many in a row.

    Args:
        call: Takes microseconds or more.
        calls: How many in a row; on a GPU they queue up as in a training step.
        device: "cpu" or "cuda".
    """
    loop = timeit.Timer(call)  # no garbage collection, and next to no loop
    return timed(lambda: loop.timeit(calls), device)[1] / calls


def synchronize(device: str) -> None:
    """Wait until a device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def pick_device(word: str | None) -> str:
    """Return the device that a flag means; None: cuda where there is one.

    Raises:
        UserError: If cuda is asked for and there is none.
    """
    if word == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device here; use --device cpu."
        raise UserError(message)
    return word or hardware.capabilities().device


def run_in_subprocess(module: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run a task in a subprocess; return its result.

    Args:
        module: One that takes the task as JSON, its only argument, and whose last
            line of output is JSON.
        task: Plain values.

    Raises:
        UserError: If the process fails, with its last words.
    """
    command = [sys.executable, "-m", module, json.dumps(task)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | hardware.child_environment(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        message = f"contender {task} failed with status {done.returncode}: {last}"
        raise UserError(message)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


SPREAD = "+-: half of the rounds lie as near to the ratio"


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
    if tunables:
        notes.append(f"GLIBC_TUNABLES={tunables}")
    return notes


_UNPRINTED = {"command", "tables", "device", "json"}


def _flags(arguments: argparse.Namespace) -> str:
    """Spell every setting as a flag, defaults too: they may change."""
    words = []
    for name, value in vars(arguments).items():
        if name not in _UNPRINTED and value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name.replace('_', '-')} {text}")
    return " ".join(words)


def progress(line: str) -> None:
    """Tell who waits how far it is."""
    print(line, file=sys.stderr, flush=True)

"""`halfstep bench probe`: what a probe adds to a training step of a BERT encoder.

In: flags. Out: a table. The same encoder trains without a probe, with flags, with a
sampling probe between its samples, and with statistics in every step; all begin with
the same weights, read the same batches, and take turns step by step. What sampling
costs in the mean is computed from the last two, round by round.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from halfstep.bench import encoder, journal, measure
from halfstep.diagnostics.probe import Probe
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from halfstep.bench.encoder import Batch, Workload
    from halfstep.bench.loops import Loop
    from halfstep.diagnostics.probe import Event

NONE, FLAGS, BETWEEN, FULL = "none", "flags", "between samples", "full"
CONTENDERS = (NONE, FLAGS, BETWEEN, FULL)
SAMPLED = "sampled"
"""Computed: of `every` steps one as `FULL`, the others as `BETWEEN`."""

TARGETS = {FLAGS: 1.03, SAMPLED: 1.03}
"""Most that a step may take, over one without a probe: what nobody minds to leave on.
Statistics in every step are for an hour of debugging."""

_WARM_UP = 3  # steps of each seed whose time does not count
_NEVER = 2**31 - 1
_COLUMNS = ("probe", "ms a step", f"x {NONE}", "+-", "target", "within")


@dataclass(frozen=True)
class Probed:
    """A model that learns, perhaps with a probe on it."""

    loop: Loop
    probe: Probe | None

    def step(self, batch: Batch) -> Tensor:
        """Step once; return the loss."""
        loss = self.loop.step([batch])
        if self.probe is not None:
            self.probe.step()
        return loss


def contender(name: str, loop: str, work: Workload, seed: int) -> Probed:
    """Return a contender; all of one seed begin with the same weights.

    Events become text, as in metrics.jsonl, and are then forgotten.
    """
    training_loop = encoder.make_loop(loop, work, seed)
    if name == NONE:
        return Probed(training_loop, None)
    probe = {
        FLAGS: partial(Probe, mode="flags"),
        BETWEEN: partial(Probe, mode="sampled", every=_NEVER),
        FULL: partial(Probe, mode="full"),
    }[name]
    return Probed(training_loop, probe(training_loop.model, log=_written))


def _written(event: Event) -> None:
    json.dumps(event, allow_nan=False)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Let all contenders train in turn; return what each step took.

    Raises:
        UserError: If a flag contradicts another or the machine, or transformers is
            not installed.
    """
    work = encoder.work_of(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    numbers = 0
    for seed in range(work.seeds):
        numbers = take_times(work, arguments.loop, seed, seconds)
        measure.progress(f"seed {seed + 1}/{work.seeds}: done")
    seconds[SAMPLED] = amortised(seconds, arguments.every)
    times = measure.Times(seconds)
    rows = [_row(times, name) for name in (*CONTENDERS, SAMPLED)]
    mean = f"of {arguments.every} steps one as {FULL!r}, the others as {BETWEEN!r}"
    notes = (
        measure.in_turn(len(seconds[NONE])),
        f"x {NONE}: median of the ratios within a round; {measure.SPREAD}",
        f"{SAMPLED}: computed; {mean}",
        f"{FULL}: {numbers / 1e6:.1f} million numbers counted and cast twice a step",
        f"trained: {arguments.loop}",
        *measure.conditions("probe", work.device, arguments),
    )
    return [Table("A probe on an encoder", _COLUMNS, tuple(rows), notes)]


def amortised(seconds: dict[str, list[float]], every: int) -> list[float]:
    """Return, round by round, the mean step of a probe that samples each `every`."""
    pairs = zip(seconds[BETWEEN], seconds[FULL], strict=True)
    return [((every - 1) * between + full) / every for between, full in pairs]


def take_times(
    work: Workload, loop: str, seed: int, seconds: dict[str, list[float]]
) -> int:
    """Train all contenders from one seed; add the seconds of each step.

    Returns:
        How many numbers the statistics of one step count.
    """
    contenders = {name: contender(name, loop, work, seed) for name in CONTENDERS}
    for number, batch in enumerate(encoder.draw_batches(work, seed)):
        for name in measure.order(contenders, number):
            torch.manual_seed(seed * work.steps + number)  # the same dropout for all
            step = partial(contenders[name].step, batch)
            _, took = measure.timed(step, work.device)
            journal.record(name, seed=seed, step=number, seconds=took)
            if number >= _WARM_UP:
                seconds[name].append(took)
    probe = contenders[FULL].probe
    return 0 if probe is None else sum(s.count for s in probe.stats.values())


def _row(times: measure.Times, name: str) -> tuple[Cell, ...]:
    ratio, target = times.ratio(name, NONE), TARGETS.get(name)
    return (
        name,
        times.median(name) * 1e3,
        ratio,
        times.spread(name, NONE),
        target,
        None if target is None else ratio <= target,
    )

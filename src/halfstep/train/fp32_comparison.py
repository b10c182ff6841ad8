"""Trains some steps in fp32 and at a run's level, in turn: time, memory and loss."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from halfstep.diagnostics.preflight.model_copy import SavedBytes
from halfstep.machine.recommendation import Choice, resolve
from halfstep.policy.levels import O0
from halfstep.reporting.table import Table
from halfstep.scaling import LossScaleCollapse
from halfstep.train.plan import Timers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfstep.distributed.process_group import World
    from halfstep.train.loop import Trainer
    from halfstep.train.step_dataset import StepBatch

_WARM_UP = 3
"""Steps that are not timed: they also allocate, and fill caches."""
_FEWEST = 2  # ratios, for a spread
_SIDES = ("fp32", "level")


def compare_with_fp32(
    new_trainer: Callable[[Choice], Trainer], choice: Choice, steps: int, world: World
) -> dict[str, Any]:
    """Train the first steps of a run in fp32 and at its level, and measure them.

    Both start from the run's first weights and take the same batches, in turn. All
    ranks must call it.

    Args:
        new_trainer: Returns a trainer at the start of the run, at a level.
        choice: The run's level and format.
        steps: Timed steps of each, >= 2, after three that are not timed. Skipped
            steps do not count, and the run may be shorter.
        world: Ranks and device.

    Returns:
        Plain values for the summary; only "note" if there was nothing to compare.

    Raises:
        RuntimeError: With several ranks, as the others would wait for this one.
    """
    if not choice.level.low:
        return {"note": "the run is in fp32 itself"}
    fp32 = resolve(O0.name, "auto", world.device.type)
    last = num_skipped = 0
    pairs: list[list[float]] = []
    losses = [0.0, 0.0]
    try:
        trainers = [new_trainer(each) for each in (fp32, choice)]
        steps_of_run = trainers[0].job.steps
        last = min(_WARM_UP + steps, trainers[0].job.plan.total_steps)
        for number in range(1, last + 1):
            batch = steps_of_run[number]
            for each in trainers:  # the run has compiled for this length, fp32 has not
                _passes(each, batch)
            records: list[dict[str, Any]] = [{}, {}]
            times = [0.0, 0.0]
            # The second of a pair has warm caches.
            for index in (0, 1) if number % 2 else (1, 0):
                clock = Timers({"input": 0.0})
                records[index] = trainers[index].train_step(batch, clock)
                times[index] = sum(clock.seconds.values())
            losses = [record["loss"] for record in records]
            skipped = any(record["skipped"] for record in records)
            if number > _WARM_UP and not skipped:
                pairs.append(times)
            num_skipped += skipped
        sizes = [_passes(each, steps_of_run[1]) for each in trainers]
    except RuntimeError as error:  # a collapse, or no memory for two more models
        if world.size > 1 and not isinstance(error, LossScaleCollapse):
            raise
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0]}
    if len(pairs) < _FEWEST:
        timed = f"{last} steps, {num_skipped} skipped, the first {_WARM_UP} not timed"
        return {"note": f"too few steps to compare: {timed}"}
    ratios = [low / full for full, low in pairs]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    milliseconds = [1000 * statistics.median(each) for each in zip(*pairs, strict=True)]
    return {
        "steps": len(ratios),
        "skipped": num_skipped,
        "ms": dict(zip(_SIDES, milliseconds, strict=True)),
        "time_ratio": statistics.median(ratios),
        "time_spread": (quartiles[2] - quartiles[0]) / 2,
        "bytes": dict(zip(_SIDES, sizes, strict=True)),
        "loss": dict(zip(_SIDES, losses, strict=True)),
    }


def _passes(trainer: Trainer, batch: StepBatch) -> int:
    """Run passes without an update; return the bytes of state and saved activations."""
    session, size = trainer.session, 0
    for part in batch.parts:
        saved = SavedBytes(session.model)
        with saved.counting():
            loss = trainer.micro_batch_loss(part)
        session.backward(loss)
        size = sum(session.memory().values()) + saved.bytes  # while gradients exist
        session.zero_grad()
    return size


def comparison_table(facts: Mapping[str, Any], choice: Choice) -> Table:
    """Return the values of `compare_with_fp32` as a table."""
    title = "Against fp32"
    if "note" in facts:
        return Table(title, ("not compared",), ((facts["note"],),))
    rows = tuple(
        (
            "fp32" if side == "fp32" else str(choice),
            facts["ms"][side],
            facts["time_ratio"] if side == "level" else None,
            facts["time_spread"] if side == "level" else None,
            facts["bytes"][side] / 2**20,
            facts["loss"][side],
        )
        for side in _SIDES
    )
    columns = ("level", "ms a step", "x fp32", "+-", "MiB", "loss")
    steps = f"{facts['steps']} steps from step {_WARM_UP + 1} of the run"
    notes = (
        f"{steps}, in turn, without preparing batches; {facts['skipped']} skipped",
        "medians; +-: half of the interquartile range of the ratios",
        "MiB: weights, gradients, master weights, moments, and saved activations",
        "loss: of the last of these steps",
    )
    return Table(title, columns, rows, notes)

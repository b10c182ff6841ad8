"""Trains some steps in fp32 and at a run's level, in turn: time, memory and loss."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from halfstep.diagnostics.preflight.model_copy import SavedBytes
from halfstep.machine.recommendation import Choice, resolve
from halfstep.policy.levels import O0
from halfstep.reporting.table import Table
from halfstep.scaling import LossScaleCollapse
from halfstep.train.train_state import Timers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfstep.train.loop import Trainer
    from halfstep.train.step_dataset import StepBatch

_WARM_UP = 3
"""Steps that are not timed: they also allocate, compile and fill caches."""


def compare_with_fp32(
    new_trainer: Callable[[Choice], Trainer], choice: Choice, steps: int, device: str
) -> dict[str, Any]:
    """Train the first steps of a run in fp32 and at its level, and measure them.

    Both start from the run's first weights and take the same batches, in turn. All
    ranks must call it.

    Args:
        new_trainer: Returns a trainer at the start of the run, at a level.
        choice: The run's level and format.
        steps: Timed steps of each, >= 2, after a few that are not timed. They are
            fewer if the run is shorter.
        device: "cpu" or "cuda".

    Returns:
        Plain values for the summary; only "note" if there was nothing to compare.
    """
    if not choice.level.low:
        return {"note": "the run is in fp32 itself"}
    fp32 = resolve(O0.name, "auto", device)
    trainers = [new_trainer(each) for each in (fp32, choice)]
    job = trainers[0].job
    last = min(_WARM_UP + steps, job.plan.total_steps)
    if last < _WARM_UP + 2:
        return {"note": f"a run of {last} steps is too short to time them"}
    seconds: tuple[list[float], list[float]] = ([], [])
    losses = [0.0, 0.0]
    try:
        for number in range(1, last + 1):
            batch = job.steps[number]
            # The second of a pair has warm caches.
            for index in (0, 1) if number % 2 else (1, 0):
                clock = Timers({"input": 0.0})
                record = trainers[index].train_step(batch, clock)
                losses[index] = record["loss"]
                if number > _WARM_UP:
                    seconds[index].append(sum(clock.seconds.values()))
        memory = [_bytes_of_step(each, job.steps[1]) for each in trainers]
    except LossScaleCollapse as error:
        return {"note": str(error).splitlines()[0]}
    ratios = [low / full for full, low in zip(*seconds, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    milliseconds = [1000 * statistics.median(each) for each in seconds]
    return {
        "steps": last - _WARM_UP,
        "ms": dict(zip(("fp32", "level"), milliseconds, strict=True)),
        "time_ratio": statistics.median(ratios),
        "time_spread": (quartiles[2] - quartiles[0]) / 2,
        "bytes": dict(zip(("fp32", "level"), memory, strict=True)),
        "loss": dict(zip(("fp32", "level"), losses, strict=True)),
    }


def _bytes_of_step(trainer: Trainer, batch: StepBatch) -> int:
    """Return the bytes of all state and of what one micro-batch saves for backward."""
    session = trainer.session
    saved = SavedBytes(session.model)
    with saved.counting():
        loss = trainer.micro_batch_loss(batch.parts[0])
    session.backward(loss)
    used = sum(session.memory().values()) + saved.bytes  # while gradients exist
    session.zero_grad()
    return used


def comparison_table(facts: Mapping[str, Any], choice: Choice) -> Table:
    """Return the values of `compare_with_fp32` as a table."""
    title = "Against fp32"
    if "note" in facts:
        return Table(title, ("not compared",), ((facts["note"],),))
    rows = tuple(
        (
            "fp32" if key == "fp32" else str(choice),
            facts["ms"][key],
            facts["time_ratio"] if key == "level" else None,
            facts["time_spread"] if key == "level" else None,
            facts["bytes"][key] / 2**20,
            facts["loss"][key],
        )
        for key in ("fp32", "level")
    )
    columns = ("level", "ms a step", "x fp32", "+-", "MiB", "loss")
    how = "medians; +-: half of the ratios lie as near to their median"
    notes = (
        f"the first {facts['steps']} timed steps of this run, in turn; {how}",
        "MiB: weights, gradients, master weights, moments, and saved activations",
        "loss: of the last of these steps",
    )
    return Table(title, columns, rows, notes)

"""`halfstep bench train`: the text classifier at each level beside a plain loop.

In: flags. Out: a table of time, memory and quality. Each contender runs in a process
of its own, so that its peak memory is its own, and contenders take turns, so that a
slow minute of the machine meets them all.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from halfstep.reporting.table import Cell, Table

CONTENDERS: dict[str, dict[str, Any]] = {
    "plain-fp32": {"loop": "plain", "amp": False},
    "plain-amp": {"loop": "plain", "amp": True},
    "O0": {"loop": "halfstep", "level": "O0"},
    "O1-bf16": {"loop": "halfstep", "level": "O1", "dtype": "bf16"},
    "O2-bf16": {"loop": "halfstep", "level": "O2", "dtype": "bf16"},
    "O3-bf16": {"loop": "halfstep", "level": "O3", "dtype": "bf16"},
    "O1-fp16": {"loop": "halfstep", "level": "O1", "dtype": "fp16"},
    "O2-fp16": {"loop": "halfstep", "level": "O2", "dtype": "fp16"},
}
"""Name -> what runs. The plain loop pads to 128, tokenises in the collate function,
and uses AdamW, torch.autocast and torch.amp.GradScaler as tutorials show them."""

BASELINES = ("plain-amp", "plain-fp32")
"""Contenders that the others' speed is compared with."""


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Run the contenders in turn; return their medians, and where the time went.

    Raises:
        UserError: If a setting or the data cannot be used, or a contender fails.
    """
    from halfstep.bench import accuracy, journal, measure
    from halfstep.train.config import TrainConfig

    settings = {
        key: getattr(arguments, key)
        for key in ("data", "limit", "seed", "epochs", "model")
    }
    accuracy.load_corpus(TrainConfig(**settings))  # what is wrong with it shows now
    results: dict[str, list[dict[str, Any]]] = {n: [] for n in arguments.contenders}
    for repeat in range(arguments.repeats):
        for name in measure.order(results, repeat):
            task = CONTENDERS[name] | settings
            measured = measure.run_in_subprocess("halfstep.bench.train_worker", task)
            journal.record(name, **measured)
            results[name].append(measured)
            measure.progress(
                f"run {repeat + 1}/{arguments.repeats} {name}: "
                f"{measured['seconds']:.1f} s"
            )
    return [_table(results, settings), _step_time_table(results)]


PARTS = ("tokenise", "input", "forward", "backward", "update", "rest")
"""What the time of a run goes to; the plain loop tokenises in its input."""


def _step_time_table(results: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the milliseconds of a step, by what they went to."""
    from halfstep.reporting.table import Table

    rows: list[tuple[Cell, ...]] = []
    for name, runs in results.items():
        steps = [
            {part: 1000 * run["parts"].get(part, 0.0) / run["steps"] for part in PARTS}
            for run in runs
        ]
        medians = [statistics.median(step[part] for step in steps) for part in PARTS]
        rows.append((name, *medians, sum(medians)))
    notes = (
        "mean over a run's steps, median over runs",
        "tokenise: done once a run, spread over its steps",
        "input: the plain loop tokenises and pads there",
        "rest: reading the loss, seeds and rates; metrics.jsonl is not in it",
        "on a GPU: of the processor that gives it work",
    )
    columns = ("contender", *PARTS, "sum")
    title = "Where the time of a step goes, ms"
    return Table(title, columns, tuple(rows), notes, digits=1)


def _table(results: dict[str, list[dict[str, Any]]], settings: dict[str, Any]) -> Table:
    from halfstep.machine import hardware
    from halfstep.reporting.table import Table

    def median(name: str, key: str) -> float:
        return statistics.median(float(run[key]) for run in results[name])

    rows: list[tuple[Cell, ...]] = []
    for name in results:
        rate = median(name, "examples_per_s")
        ratios = [
            rate / median(base, "examples_per_s") if base in results else None
            for base in BASELINES
        ]
        rows.append(
            (
                name,
                median(name, "seconds"),
                rate,
                *ratios,
                median(name, "peak_memory_bytes") / 2**20,
                median(name, "train_loss"),
                median(name, "dev_loss"),
                median(name, "dev_accuracy"),
                int(median(name, "skipped")),
            )
        )
    columns = (
        "contender",
        "seconds",
        "examples/s",
        *(f"x {base}" for base in BASELINES),
        "peak MiB",
        "train loss",
        "dev loss",
        "dev accuracy",
        "skipped",
    )
    facts = hardware.capabilities()
    settings_text = ", ".join(f"{key} {value}" for key, value in settings.items())
    repeats = len(next(iter(results.values())))
    notes = (
        f"{settings_text}; median of {repeats} runs, contenders in turn",
        f"{facts.cpu}, {facts.threads} threads, torch {facts.torch}",
        "seconds: tokenising and training steps; no evaluation, no checkpoint",
        "train loss: mean over the last tenth of the steps; dev: of the last weights",
        "all: no hidden tokens, which halfstep train has by default from scratch",
        "peak: the whole process; halfstep's also evaluates, saves and reports",
    )
    return Table("Training a text classifier", columns, tuple(rows), notes)

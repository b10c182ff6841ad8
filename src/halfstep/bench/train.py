"""`halfstep bench train`: the text classifier at each level beside a plain loop.

In: flags. Out: a table of time, memory and quality. Each contender runs in a process
of its own, so that its peak memory is its own, and contenders take turns, so that a
slow minute of the machine meets them all.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    import argparse

    from halfstep.report import Cell, Table

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

BASELINE = "plain-amp"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of this bench."""
    add = parser.add_argument
    add("--data", metavar="PATH", help="texts to train on (default built-in)")
    add("--limit", type=int, metavar="N", help="first N rows only")
    add("--seed", type=int, default=123, metavar="N", help="(default 123)")
    add("--epochs", type=int, default=1, metavar="N", help="(default 1)")
    add("--model", default="tiny", metavar="NAME", help="(default tiny)")
    add("--repeats", type=int, default=1, metavar="N", help="runs each (default 1)")
    add(
        "--contenders",
        default=",".join(CONTENDERS),
        metavar="A,B",
        help=f"of {', '.join(CONTENDERS)} (default all)",
    )


def bench(arguments: argparse.Namespace) -> Table:
    """Run the contenders in turn; return their medians as a table.

    Raises:
        UserError: If a contender is unknown, or one fails.
    """
    names = arguments.contenders.split(",")
    for name in names:
        if name not in CONTENDERS:
            message = f"--contenders {name}: choose of {', '.join(CONTENDERS)}."
            raise UserError(message)
    settings = {
        key: getattr(arguments, key)
        for key in ("data", "limit", "seed", "epochs", "model")
    }
    if arguments.repeats < 1:
        message = f"--repeats {arguments.repeats} must be at least 1."
        raise UserError(message)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(arguments.repeats):
        for name in names:
            measured = _run_apart(CONTENDERS[name] | settings)
            found[name].append(measured)
            print(
                f"run {repeat + 1}/{arguments.repeats} {name}: "
                f"{measured['seconds']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    return _table(found, settings)


def _run_apart(task: dict[str, Any]) -> dict[str, Any]:
    """Run one contender in a process of its own; return what it measured."""
    command = [sys.executable, "-m", "halfstep.bench.contender", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        message = f"contender {task} failed with status {done.returncode}: {last}"
        raise UserError(message)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _table(found: dict[str, list[dict[str, Any]]], settings: dict[str, Any]) -> Table:
    from halfstep import machine
    from halfstep.report import Table

    def median(name: str, key: str) -> float:
        return statistics.median(float(run[key]) for run in found[name])

    rows: list[tuple[Cell, ...]] = []
    for name in found:
        rate = median(name, "examples_per_s")
        ratio = rate / median(BASELINE, "examples_per_s") if BASELINE in found else None
        rows.append(
            (
                name,
                median(name, "seconds"),
                rate,
                ratio,
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
        f"x {BASELINE}",
        "peak MiB",
        "train loss",
        "dev loss",
        "dev accuracy",
        "skipped",
    )
    facts = machine.capabilities()
    shown = ", ".join(f"{key} {value}" for key, value in settings.items())
    repeats = len(next(iter(found.values())))
    notes = (
        f"{shown}; median of {repeats} runs, contenders in turn",
        f"{facts.cpu}, {facts.threads} threads, torch {facts.torch}",
        "seconds: tokenising and training steps; no evaluation, no checkpoint",
        "train loss: mean over the last tenth of the steps; peak: the whole process",
    )
    return Table("Training a text classifier", columns, tuple(rows), notes)

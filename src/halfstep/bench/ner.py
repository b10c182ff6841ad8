"""`halfstep bench ner`: does a finder of entities learn as well in 16 bits?

In: flags. Out: a table of F1, precision and recall of entities over seeds, beside
memory and speed: fp32, fp16 with and without dynamic loss scaling, bf16. Each run is
`halfstep train --task ner` in a process of its own; contenders take turns on each seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.bench import accuracy, journal, measure
from halfstep.bench.accuracy import cells, median
from halfstep.errors import UserError
from halfstep.machine import fp16_emulation, hardware
from halfstep.reporting.table import Table
from halfstep.train.config import TrainConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from halfstep.bench.accuracy import Runs
    from halfstep.reporting.table import Cell

CONTENDERS: dict[str, dict[str, str]] = {
    "fp32": {"level": "O0"},
    "O1-fp16-unscaled": {"level": "O1", "dtype": "fp16", "loss_scale": "none"},
    "O1-fp16": {"level": "O1", "dtype": "fp16", "loss_scale": "dynamic"},
    "O1-bf16": {"level": "O1", "dtype": "bf16"},
    "O2-bf16": {"level": "O2", "dtype": "bf16"},
}
"""Name -> settings of `halfstep train`."""

BASELINE = "fp32"

_SHARED = ("data", "limit", "model", "epochs", "batch_size", "max_length")
_PERCENT = 100
_MIB = 2**20
_COLUMNS = (
    *("contender", "F1 %", "+-", f"to {BASELINE}", f"+- to {BASELINE}"),
    *(
        "precision %",
        "recall %",
        f"speed x {BASELINE}",
        "peak MiB",
        "skipped",
        "diverged",
    ),
)

_EMULATED = (
    "fp16: this CPU has no fp16 products, so they are computed in fp32 and rounded: "
    "scores and skipped steps are those of fp16; its speed is that of the emulation, "
    "and its peak MiB holds the fp32 copies of what is multiplied"
)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender from every seed; return what it came to.

    Raises:
        UserError: If a setting or the data cannot be used, or a run fails.
    """
    device = measure.pick_device(arguments.device)
    shared = {key: getattr(arguments, key) for key in _SHARED}
    shared |= {"task": "ner", "device": device, "mask_tokens": arguments.mask_tokens}
    rates = learning_rates(arguments.lr or [], arguments.contenders)
    configs = [TrainConfig(**shared, lr=rates[name]) for name in arguments.contenders]
    evaluation_note = accuracy.evaluation_note("F1", configs[0])
    hardware.gemm_rates(device)  # measured once, here, and not in some contender's time
    results: dict[str, list[dict[str, Any]]] = {
        name: [] for name in arguments.contenders
    }
    for seed in range(arguments.seeds):
        for name in measure.order(results, seed):
            task = shared | CONTENDERS[name] | {"seed": seed, "lr": rates[name]}
            result = measure.run_in_subprocess("halfstep.bench.accuracy", task)
            journal.record(name, seed=seed, **result)
            results[name].append(result)
            text = result.get("diverged") or f"F1 {result['scores']['f1']:.4f}"
            measure.progress(f"seed {seed + 1}/{arguments.seeds} {name}: {text}")
    notes = [evaluation_note, *measure.conditions("ner", device, arguments)]
    low = any(CONTENDERS[name].get("dtype") == "fp16" for name in results)
    if low and fp16_emulation.is_needed(device):
        notes.append(_EMULATED)
    return [table(results, notes)]


def learning_rates(
    words: Sequence[str], contenders: Sequence[str]
) -> dict[str, float | None]:
    """Return the learning rate of each contender; None: as `halfstep train` chooses.

    Args:
        words: Numbers for all, and NAME=number for one, as `--lr` reads them.
        contenders: Those that run.

    Raises:
        UserError: If one is named that does not run.
    """
    named = {
        name: float(number) for name, _, number in (w.rpartition("=") for w in words)
    }
    idle = [name for name in named if name and name not in contenders]
    if idle:
        message = (
            f"--lr {idle[0]}={named[idle[0]]:g}: {idle[0]} is not among --contenders; "
            "add it there, or leave its rate out."
        )
        raise UserError(message)
    return {name: named.get(name, named.get("")) for name in contenders}


def table(results: Runs, more: Sequence[str]) -> Table:
    """Return what contenders came to, each with its differences to fp32.

    Args:
        results: As many seeds of each; one that diverged has only "diverged".
        more: Notes on where and how.
    """
    rows = tuple(_row(results, name) for name in results)
    seeds = len(next(iter(results.values())))
    notes = (
        f"seeds: {seeds}, the same for all: first weights, order and dropout",
        "an entity counts as found if its edges and its kind are right",
        "+-: half of Student's 95 % interval for the mean over seeds",
        f"to {BASELINE}: mean of the differences, seed by seed, in points",
        "a difference below its +- is none that these seeds can tell from 0",
        "speed: of training steps, median of the ratios seed by seed",
        "peak: the whole process with its libraries, or the GPU; median",
        "skipped: steps of all seeds that ended",
        *accuracy.divergence_notes(results),
        *more,
    )
    return Table("Entities over seeds", _COLUMNS, rows, notes)


def _row(results: Runs, name: str) -> tuple[Cell, ...]:
    completed = accuracy.finished(results[name])
    pairs = accuracy.pairs(results, name, BASELINE)

    def percent(score: str) -> list[float]:
        return [_PERCENT * each["scores"][score] for each in completed]

    return (
        name,
        *cells(percent("f1")),
        *cells([_PERCENT * (a["scores"]["f1"] - b["scores"]["f1"]) for a, b in pairs]),
        *cells(percent("precision"))[:1],
        *cells(percent("recall"))[:1],
        median([b["seconds"] / a["seconds"] for a, b in pairs]),
        median([each["peak_bytes"] / _MIB for each in completed]),
        sum(each["skipped"] for each in completed) if completed else None,
        len(results[name]) - len(completed),
    )

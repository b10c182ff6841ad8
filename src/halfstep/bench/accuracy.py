"""`halfstep bench quality`: does a classifier learn as well with 16-bit weights?

In: flags. Out: a table of accuracy and loss with their intervals over seeds, beside
time and memory. Each run is `halfstep train` in a process of its own; contenders take
turns on each seed, and are compared with fp32 seed by seed.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.bench import journal, measure
from halfstep.machine import fp16_emulation, hardware
from halfstep.reporting.table import Cell, Table
from halfstep.scaling import LossScaleCollapse
from halfstep.train.config import TrainConfig
from halfstep.train.data.corpus import load
from halfstep.train.run import run
from halfstep.train.signals import Diverged

if TYPE_CHECKING:
    import argparse

    from halfstep.train.data.corpus import Corpus

CONTENDERS: dict[str, dict[str, str]] = {
    "fp32": {"level": "O0"},
    "O1": {"level": "O1", "dtype": "bf16"},
    "O2": {"level": "O2", "dtype": "bf16", "master": "fp32"},
    "O2-split": {"level": "O2", "dtype": "bf16", "master": "split"},
    "O2-kahan": {"level": "O2", "dtype": "bf16", "master": "kahan"},
    "O2-stochastic": {"level": "O2", "dtype": "bf16", "master": "stochastic"},
    "O2-none": {"level": "O2", "dtype": "bf16", "master": "none"},
    "O3": {"level": "O3", "dtype": "bf16"},
}
"""Name -> settings of `halfstep train`."""

BASELINE = "fp32"

_SHARED = {
    "data": "data",
    "limit": "limit",
    "dev_share": "share",
    "model": "model",
    "epochs": "epochs",
}
"""Setting of `halfstep train`, the same for all contenders -> flag."""
_LEVEL = 0.95
"""Of confidence."""
_PERCENT = 100
_MIB = 2**20

_COLUMNS = (
    "contender",
    "accuracy %",
    "+-",
    f"to {BASELINE}",
    f"+- to {BASELINE}",
    "dev loss",
    f"loss to {BASELINE}",
    "+- of loss",
    f"time x {BASELINE}",
    "peak MiB",
    "diverged",
)

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Contender -> what each seed came to, in order."""


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender from every seed; return what it came to.

    Raises:
        UserError: If a setting or the data cannot be used, or a run fails.
    """
    device = measure.pick_device(arguments.device)
    shared = {key: getattr(arguments, flag) for key, flag in _SHARED.items()}
    shared["device"] = device
    note = evaluation_note("accuracy", TrainConfig(**shared))
    hardware.gemm_rates(device)  # measured once, here, and not in some contender's time
    results: dict[str, list[dict[str, Any]]] = {
        name: [] for name in arguments.contenders
    }
    for seed in range(arguments.seeds):
        for name in measure.order(results, seed):
            task = shared | CONTENDERS[name] | {"seed": seed}
            result = measure.run_in_subprocess("halfstep.bench.accuracy", task)
            journal.record(name, seed=seed, **result)
            results[name].append(result)
            text = _result_text(result)
            measure.progress(f"seed {seed + 1}/{arguments.seeds} {name}: {text}")
    conditions = measure.conditions("quality", device, arguments)
    return [table(results, [note, *conditions])]


def evaluation_note(score: str, config: TrainConfig) -> str:
    """Read the data once, so that what is wrong with it shows now; say who judges.

    Args:
        score: What of the texts is told.
        config: Of any of the runs.

    Raises:
        UserError: If the data cannot be used.
    """
    corpus = load_corpus(config)
    split = "test" if corpus.test else "dev"
    count = len(corpus.test or corpus.dev)
    return (
        f"{score}: of {count} {split} texts, by which nothing was chosen: the last "
        f"weights are judged; trained on {len(corpus.train)}"
    )


def load_corpus(config: TrainConfig) -> Corpus:
    """Return the data of a run.

    Raises:
        UserError: If it cannot be used.
    """
    return load(
        None if config.data is None else Path(config.data),
        task=config.task,
        label_names=None,
        limit=config.limit,
        dev_share=config.dev_share,
        seed=config.seed,
    )


def _result_text(result: Mapping[str, Any]) -> str:
    if "diverged" in result:
        return str(result["diverged"])
    return (
        f"accuracy {result['accuracy']:.4f}, dev loss {result['dev_loss']:.4f}, "
        f"{result['seconds']:.1f} s, {result['peak_bytes'] / _MIB:.0f} MiB"
    )


# One run


def train_once(task: dict[str, Any]) -> dict[str, Any]:
    """Run `halfstep train` with some settings; return what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"out": str(Path(folder) / "run"), "eval_every": measure.EVAL_ONLY_AT_END}
        try:
            with contextlib.redirect_stdout(sys.stderr), _fp16_emulation(task):
                summary = run(task | own).summary
        except (Diverged, LossScaleCollapse) as error:
            return {"diverged": " ".join(str(error).split())}
    scores = summary.get("test", summary["dev"])
    return {
        "accuracy": scores["accuracy"],
        "scores": {k: v for k, v in scores.items() if isinstance(v, float)},
        "dev_loss": summary["dev"]["loss"],
        "skipped": summary["skipped"],
        "seconds": summary["train_seconds"],
        "peak_bytes": summary["peak_memory_bytes"],
    }


def _fp16_emulation(
    task: Mapping[str, Any],
) -> contextlib.AbstractContextManager[object]:
    """Return a region in which fp16 takes no hours, where a machine has none."""
    if task.get("dtype") == "fp16" and fp16_emulation.is_needed(task["device"]):
        return fp16_emulation.Fp32Matmuls()  # type: ignore[no-untyped-call]
    return contextlib.nullcontext()


# What seeds tell


@dataclass(frozen=True)
class Interval:
    """A mean, and how far from it the true one may lie."""

    mean: float
    half: float | None
    """Half the width of the 95 % interval; None where one value tells no spread."""


def interval(values: Sequence[float]) -> Interval | None:
    """Return Student's interval for the mean of independent values; None of none."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, student(len(values) - 1) * error)


def student(freedom: int) -> float:
    """Return below what |t| lies in 95 % of Student's distribution.

    Formula: with tan(a) = t / sqrt(freedom), P(|T| < t) is sin(a) times a sum of even
    powers of cos(a) if the degrees of freedom are even; if they are odd, 2 / pi times
    a + sin(a) times a sum of odd powers.

    Args:
        freedom: Degrees of it, >= 1.

    References:
        Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _within(middle, freedom) < _LEVEL:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(high)


def _within(angle: float, freedom: int) -> float:
    """Return P(|T| < t) for tan(angle) = t / sqrt(freedom)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def table(results: Runs, more: Sequence[str]) -> Table:
    """Return what contenders came to, each with its differences to the baseline.

    Args:
        results: As many seeds of each; one that diverged has only "diverged".
        more: Notes on where and how.
    """
    rows = tuple(_row(results, name) for name in results)
    seeds = len(next(iter(results.values())))
    notes = (
        f"seeds: {seeds}, the same for all; contenders in turn",
        "a seed draws first weights, order and dropout; of a single file, the split",
        f"+-: half of Student's {_LEVEL:.0%} interval for the mean over seeds",
        f"to {BASELINE}: mean of the differences, seed by seed, in points",
        "a difference below its +- is none that these seeds can tell from 0",
        "one such interval in twenty misses the truth by luck",
        f"time: of training steps, median of the ratios to {BASELINE} seed by seed",
        "peak: the whole process with its libraries, or the GPU; median",
        *divergence_notes(results),
        *more,
    )
    return Table("Quality over seeds", _COLUMNS, rows, notes)


def _row(results: Runs, name: str) -> tuple[Cell, ...]:
    completed = finished(results[name])
    both = pairs(results, name, BASELINE)
    return (
        name,
        *cells([_PERCENT * each["accuracy"] for each in completed]),
        *cells([_PERCENT * (a["accuracy"] - b["accuracy"]) for a, b in both]),
        *cells([each["dev_loss"] for each in completed])[:1],
        *cells([a["dev_loss"] - b["dev_loss"] for a, b in both]),
        median([a["seconds"] / b["seconds"] for a, b in both]),
        median([each["peak_bytes"] / _MIB for each in completed]),
        len(results[name]) - len(completed),
    )


# What every table over seeds is made of


def finished(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs that came to something."""
    return [each for each in runs if "diverged" not in each]


def pairs(
    results: Runs, name: str, baseline: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return a contender's run and the baseline's, of each seed that both finished.

    The baseline itself has none: it is not compared with itself.
    """
    bases = () if name == baseline else results.get(baseline, ())
    return [
        (mine, base)
        for mine, base in zip(results[name], bases, strict=False)  # perhaps no bases
        if "diverged" not in mine and "diverged" not in base
    ]


def divergence_notes(results: Runs) -> list[str]:
    """Return a note on each run that diverged."""
    return [
        f"{name}, seed {seed + 1}: {each['diverged']}"
        for name, runs in results.items()
        for seed, each in enumerate(runs)
        if "diverged" in each
    ]


def cells(values: Sequence[float]) -> tuple[Cell, Cell]:
    """Return the mean of values and half its interval, None where there is none."""
    estimate = interval(values)
    return (None, None) if estimate is None else (estimate.mean, estimate.half)


def median(values: Sequence[float]) -> float | None:
    """Return the median; None of none."""
    return statistics.median(values) if values else None


if __name__ == "__main__":
    print(json.dumps(train_once(json.loads(sys.argv[1]))))

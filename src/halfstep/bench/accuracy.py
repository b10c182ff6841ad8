"""`halfstep bench quality` and `bench ner`: does a model learn as well in 16 bits?

In: flags. Out: a table of scores with their intervals over seeds, beside time and
memory. Each run is `halfstep train` in a process of its own; contenders take turns on
each seed, and are compared with fp32 seed by seed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy import stats

from halfstep.bench import contenders, measure, worker_process
from halfstep.bench.measure import MIB, median
from halfstep.errors import UserError
from halfstep.machine import fp16_emulation, hardware
from halfstep.scaling import LossScaleCollapse
from halfstep.train.config import TrainConfig
from halfstep.train.data.corpus import load
from halfstep.train.run import run
from halfstep.train.signals import Diverged

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from halfstep.reporting.table import Cell, Table
    from halfstep.train.data.corpus import Corpus

BASELINE = "fp32"
EVAL_ONLY_AT_END = 2**31 - 1
"""Steps between evaluations: the last weights are evaluated, and no dev text has
chosen them."""

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]
"""Contender -> the result of each seed, in order; of one that diverged why."""

_EMULATED = (
    "fp16: this CPU has no fp16 matmuls, so they are computed in fp32 and rounded: "
    "scores and skipped steps are those of fp16; its speed is that of the emulation, "
    "and its peak MiB holds the fp32 copies of the operands"
)


def quality(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender of `bench quality` from every seed."""
    settings = {"dev_share": arguments.share}
    settings |= {key: getattr(arguments, key) for key in ("data", "limit")}
    settings |= {key: getattr(arguments, key) for key in ("model", "epochs")}
    tasks = {name: settings | contenders.QUALITY[name] for name in arguments.contenders}
    results, notes = _train("quality", "accuracy", tasks, arguments)
    return [quality_table(results, notes)]


def ner(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender of `bench ner` from every seed."""
    keys = ("data", "limit", "model", "epochs", "batch_size", "max_length")
    settings = {key: getattr(arguments, key) for key in (*keys, "mask_tokens")}
    rates = learning_rates(arguments.lr or [], arguments.contenders)
    tasks = {
        name: settings | contenders.NER[name] | {"task": "ner", "lr": rates[name]}
        for name in arguments.contenders
    }
    results, notes = _train("ner", "F1", tasks, arguments)
    is_fp16 = any(task.get("dtype") == "fp16" for task in tasks.values())
    if is_fp16 and fp16_emulation.is_needed(measure.pick_device(arguments.device)):
        notes.append(_EMULATED)
    return [ner_table(results, notes)]


def learning_rates(
    rates: Sequence[str], names: Sequence[str]
) -> dict[str, float | None]:
    """Return the learning rate of each contender; None: as `halfstep train` chooses.

    Args:
        rates: Numbers for all, and NAME=number for one, as `--lr` reads them.
        names: The contenders that run.

    Raises:
        UserError: If one is named that does not run.
    """
    parts = (word.rpartition("=") for word in rates)
    by_name = {name: float(rate) for name, _, rate in parts}
    for name, rate in by_name.items():
        if name and name not in names:
            message = (
                f"--lr {name}={rate:g}: {name} is not among --contenders; "
                "add it there, or leave its rate out."
            )
            raise UserError(message)
    return {name: by_name.get(name, by_name.get("")) for name in names}


def _train(
    bench: str,
    score: str,
    tasks: Mapping[str, dict[str, Any]],
    arguments: argparse.Namespace,
) -> tuple[Runs, list[str]]:
    """Train each contender from each seed; return the results, and notes on them."""
    device = measure.pick_device(arguments.device)
    configs = [TrainConfig(**task, device=device) for task in tasks.values()]
    corpus = load_corpus(configs[0])  # a fault of the data shows now
    split, texts = ("test", corpus.test) if corpus.test else ("dev", corpus.dev)
    evaluated = (
        f"{score}: of {len(texts)} {split} texts, by which nothing was chosen: the "
        f"last weights are evaluated; trained on {len(corpus.train)}"
    )
    notes = [evaluated, *measure.conditions(bench, device, arguments)]
    hardware.gemm_rates(device)  # measured once, here, and not in a contender's time
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for seed in range(arguments.seeds):
        for name in measure.order(tasks, seed):
            task = tasks[name] | {"device": device, "seed": seed}
            result = worker_process.run_once(name, __name__, {"task": task})
            results[name].append(result)
            text = result.get("diverged") or (
                f"{score} {result['scores'][score.lower()]:.4f}, "
                f"dev loss {result['dev_loss']:.4f}, "
                f"{result['seconds']:.1f} s, {result['peak_bytes'] / MIB:.0f} MiB"
            )
            measure.progress(f"seed {seed + 1}/{arguments.seeds} {name}: {text}")
    return results, notes


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


# One run, in a process of its own


def worker(task: dict[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return what runs a task."""
    return lambda _: {"seed": task["seed"]} | train_once(task)


def train_once(task: dict[str, Any]) -> dict[str, Any]:
    """Run `halfstep train` with some settings; return its result."""
    emulated = task.get("dtype") == "fp16" and fp16_emulation.is_needed(task["device"])
    emulation: Any = fp16_emulation.Fp32Matmuls if emulated else contextlib.nullcontext
    with tempfile.TemporaryDirectory() as folder:
        own = {"out": str(Path(folder) / "run"), "eval_every": EVAL_ONLY_AT_END}
        try:
            with emulation():
                summary = run(task | own).summary
        except (Diverged, LossScaleCollapse) as error:
            return {"diverged": " ".join(str(error).split())}
    scores = summary.get("test", summary["dev"])
    return {
        "scores": {k: v for k, v in scores.items() if isinstance(v, float)},
        "dev_loss": summary["dev"]["loss"],
        "skipped": summary["skipped"],
        "seconds": summary["train_seconds"],
        "peak_bytes": summary["peak_memory_bytes"],
    }


# The tables


def quality_table(results: Runs, more: Sequence[str]) -> Table:
    """Return accuracy and loss of contenders, and their differences to the baseline.

    Args:
        results: As many seeds of each; one that diverged has only "diverged".
        more: Notes on where and how.
    """

    def cells(runs: list[Run], pairs: list[tuple[Run, Run]]) -> dict[str, Cell]:
        loss, _ = interval([run["dev_loss"] for run in runs])
        more, half = interval([a["dev_loss"] - b["dev_loss"] for a, b in pairs])
        return {
            "dev loss": loss,
            f"loss to {BASELINE}": more,
            "+- of loss": half,
            f"time x {BASELINE}": median(
                [a["seconds"] / b["seconds"] for a, b in pairs]
            ),
            "peak MiB": median([run["peak_bytes"] / MIB for run in runs]),
        }

    notes = (
        "a seed draws first weights, order and dropout; of a single file, the split",
        "one such interval in twenty misses the truth by chance",
        f"time: of training steps, median of the ratios to {BASELINE} seed by seed",
        *more,
    )
    rows = _rows(results, "accuracy", "accuracy %", cells)
    return _table("Quality over seeds", results, rows, notes)


def ner_table(results: Runs, more: Sequence[str]) -> Table:
    """Return F1, precision and recall of contenders; see `quality_table`."""

    def cells(runs: list[Run], pairs: list[tuple[Run, Run]]) -> dict[str, Cell]:
        scores = [run["scores"] for run in runs]
        return {
            "precision %": interval([100 * each["precision"] for each in scores])[0],
            "recall %": interval([100 * each["recall"] for each in scores])[0],
            f"speed x {BASELINE}": median(
                [b["seconds"] / a["seconds"] for a, b in pairs]
            ),
            "peak MiB": median([run["peak_bytes"] / MIB for run in runs]),
            "skipped": sum(run["skipped"] for run in runs) if runs else None,
        }

    notes = (
        "a seed draws first weights, order and dropout",
        "an entity counts as correct if its edges and its type are",
        "speed: of training steps, median of the ratios seed by seed",
        "skipped: steps of all seeds that ended",
        *more,
    )
    rows = _rows(results, "f1", "F1 %", cells)
    return _table("Entities over seeds", results, rows, notes)


def _rows(
    results: Runs,
    score: str,
    column: str,
    cells: Callable[[list[Run], list[tuple[Run, Run]]], dict[str, Cell]],
) -> list[dict[str, Cell]]:
    """Return a row for each contender.

    Args:
        results: Of all contenders.
        score: Its key.
        column: Its column.
        cells: More cells, of the runs that did not diverge, and of the pairs of runs
            of the contender and the baseline from one seed where both did not.
    """
    rows: list[dict[str, Cell]] = []
    for name, all_runs in results.items():
        runs = [run for run in all_runs if "diverged" not in run]
        # The baseline is not compared with itself; and perhaps it did not run.
        bases = () if name == BASELINE else results.get(BASELINE, ())
        both = zip(all_runs, bases, strict=False)
        pairs = [(a, b) for a, b in both if "diverged" not in {*a, *b}]
        value, half = interval([100 * run["scores"][score] for run in runs])
        difference, its_half = interval(
            [100 * (a["scores"][score] - b["scores"][score]) for a, b in pairs]
        )
        rows.append(
            {
                "contender": name,
                column: value,
                "+-": half,
                f"to {BASELINE}": difference,
                f"+- to {BASELINE}": its_half,
                **cells(runs, pairs),
                "diverged": len(all_runs) - len(runs),
            }
        )
    return rows


def _table(
    title: str, results: Runs, rows: list[dict[str, Cell]], notes: Sequence[str]
) -> Table:
    seeds = len(next(iter(results.values())))
    shared = (
        f"seeds: {seeds}, the same for all; contenders in turn",
        "+-: half of Student's 95 % interval for the mean over seeds",
        f"to {BASELINE}: mean of the differences, seed by seed, in points",
        "a difference below its +- cannot be distinguished from 0 by these seeds",
        "peak: the whole process with its libraries, or the GPU; median",
    )
    diverged = (
        f"{name}, seed {seed + 1}: {run['diverged']}"
        for name, runs in results.items()
        for seed, run in enumerate(runs)
        if "diverged" in run
    )
    return measure.table(title, rows, (*shared, *diverged, *notes))


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of independent values, and half of its 95 % interval.

    Of one value there is no interval, of none no mean.
    """
    if len(values) <= 1:
        return (values[0] if values else None), None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), stats.t.ppf(0.975, len(values) - 1).item() * error

"""`halfstep bench quality` and `bench ner`: accuracy of 16-bit training.

Reports scores with confidence intervals over seeds, time and memory. Each run is
`halfstep train` in a process of its own; contenders take turns on each seed, and are
compared with fp32 seed by seed.
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
"""Evaluation interval longer than any run: the last weights are evaluated, none are
selected by dev score."""

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]
"""Contender -> results by seed; a diverged run has only the key "diverged"."""

_EMULATED = (
    "fp16: this CPU has no fp16 matmuls, so they are computed in fp32 and rounded: "
    "scores and skipped steps are those of fp16; its speed is that of the emulation, "
    "and its peak MiB holds the fp32 copies of the operands"
)


def quality(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender of `bench quality` with every seed."""
    settings = {"dev_share": arguments.share}
    settings |= {key: getattr(arguments, key) for key in ("data", "limit")}
    settings |= {key: getattr(arguments, key) for key in ("model", "epochs")}
    tasks = {name: settings | contenders.QUALITY[name] for name in arguments.contenders}
    results, notes = _train("quality", "accuracy", tasks, arguments)
    return [quality_table(results, notes)]


def ner(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender of `bench ner` with every seed."""
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
    """Return each contender's learning rate; None: the default of `halfstep train`.

    Args:
        rates: Values of `--lr`: a number for all, NAME=number for one.
        names: The contenders to run.

    Raises:
        UserError: If a named contender is not run.
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
    """Train each contender with each seed; return the results and notes."""
    device = measure.pick_device(arguments.device)
    configs = [TrainConfig(**task, device=device) for task in tasks.values()]
    corpus = load_corpus(configs[0])  # fails early if the data are invalid
    split, texts = ("test", corpus.test) if corpus.test else ("dev", corpus.dev)
    evaluated = (
        f"{score}: of {len(texts)} {split} texts, by which nothing was chosen: the "
        f"last weights are evaluated; trained on {len(corpus.train)}"
    )
    notes = [evaluated, *measure.conditions(bench, device, arguments)]
    hardware.gemm_rates(device)  # measured once here rather than in a contender's time
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
    """Load the data of a run.

    Raises:
        UserError: If the data are invalid.
    """
    return load(
        None if config.data is None else Path(config.data),
        task=config.task,
        label_names=None,
        limit=config.limit,
        dev_share=config.dev_share,
        seed=config.seed,
    )


# One run, in its own process


def worker(task: dict[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return the function that runs a task."""
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
    """Return accuracy and loss of each contender, and the differences to the baseline.

    Args:
        results: Equally many seeds per contender.
        more: Notes on the conditions.
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
        "one such interval in twenty misses the true mean by chance",
        f"time: of training steps, median of the ratios to {BASELINE} seed by seed",
        *more,
    )
    rows = _rows(results, "accuracy", "accuracy %", cells)
    return _table("Quality over seeds", results, rows, notes)


def ner_table(results: Runs, more: Sequence[str]) -> Table:
    """Return F1, precision and recall of each contender; see `quality_table`."""

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
        results: By contender.
        score: Key of the score.
        column: Column of the score.
        cells: Returns further cells from the runs that did not diverge, and from the
            pairs of runs of contender and baseline with the same seed where neither
            diverged.
    """
    rows: list[dict[str, Cell]] = []
    for name, all_runs in results.items():
        runs = [run for run in all_runs if "diverged" not in run]
        # Not compared with itself; the baseline may also not have run.
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

    The interval is None for fewer than two values, the mean for none.
    """
    if len(values) <= 1:
        return (values[0] if values else None), None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), stats.t.ppf(0.975, len(values) - 1).item() * error

"""`compare`: trains levels and fp32 over seeds, and gives a verdict on each level."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch.rng_state import RandomState
from halfstep.diagnostics.preflight.model_check import default_context
from halfstep.errors import (
    UserError,
    require,
    require_int,
    require_positive,
    require_type,
)
from halfstep.parity.candidate import PERTURBED, REFERENCE, parse_all
from halfstep.parity.comparison import MIB, Comparison
from halfstep.parity.equivalence import FEWEST_PAIRS
from halfstep.parity.run_store import RunStore
from halfstep.parity.training_run import (
    Run,
    Workload,
    check_paired,
    check_repeatable,
    first_checksums,
    train,
)
from halfstep.train import dependencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from halfstep.parity.candidate import Candidate
    from halfstep.parity.training_run import Batches, TrainingParts

_SEED_LIMIT = 2**31  # of torch's 64 bits, the other half is the step
_MARGIN_SHARE = 0.01
_MARGIN_REASON = (
    "1 % of fp32's mean, as MLPerf Inference asks for 99 % of the accuracy of fp32; "
    "set margin to what matters to you"
)
_MASKS = (
    "on a GPU, dropout draws other masks in 16 bits than in fp32: the pairs differ by "
    "those, too"
)
_TF32 = (
    "TF32 is on, so fp32 is not strict: set torch.backends.cudnn.allow_tf32 and "
    "torch.backends.cuda.matmul.allow_tf32 to False"
)
_LAST_LOSSES = "loss of the last steps"


def compare(
    make: Callable[[int], TrainingParts],
    batches: Batches,
    levels: Sequence[str] = ("O0", "O1", "O2"),
    *,
    steps: int | None = None,
    seeds: int | Sequence[int] = 5,
    metric: Callable[[nn.Module], float] | None = None,
    margin: float | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Train at several levels and in fp32, in pairs, and compare the results.

    The runs of a seed have the same initial weights, batches and random numbers in each
    step, so that their difference is that of the level. Besides fp32 and the levels, a
    fp32 run is trained whose initial weights differ by one ulp. The random state of
    torch, Python and numpy is restored at the end.

    Args:
        make: `make(seed)` returns (model, optimizer, loss_fn), made anew: a model in
            fp32 on its device, its optimizer, and `loss_fn(model, batch)`, which
            returns the mean loss, shape (). A fourth element, a dict, holds arguments
            of `prepare` that all levels share: scheduler, clip_grad_norm, accumulate.
        batches: A list, repeated as often as needed; or a function of the seed that
            returns an iterable, the same each time, if the order depends on the seed.
        levels: "O0" to "O3"; after a colon each, bf16 or fp16, an encoding of the
            master weights ("O2:split"), `loss_scale=` ("O1:fp16:loss_scale=none").
            fp32 always runs.
        steps: Optimizer steps of a run, >= 1. None: the length of a list of batches.
        seeds: Their number, counted from 0, or the seeds, each below 2**31; two or
            more. 5 resolve a margin of about twice the spread of the differences.
        metric: `metric(model)` returns the final result, higher is better. It is called
            in evaluation mode, under autocast and `torch.no_grad`. None: the mean
            training loss of the last tenth of the steps, lower is better.
        margin: Largest difference of the metric that counts as none, > 0. None: 1 % of
            fp32's mean.
        out: Folder in which finished runs are stored. A later call with the same folder
            and settings does not run them again; it may add levels and seeds. None:
            nowhere.
        progress: Called with a line after each run.

    Returns:
        The comparison; `print` it.

    Raises:
        UserError: If scipy is not installed (extra `train`); if an argument is
            invalid; if a level cannot run; if `make` or `batches` differ between
            calls, or the batches end too soon; under torchrun with several processes;
            or if `out` cannot be read or written.

    Example:
        >>> def make(seed):
        ...     model = torch.nn.Linear(8, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ...     return model, optimizer, lambda model, x: model(x).square().mean()
        >>> batches = list(torch.randn(4, 16, 8, generator=torch.manual_seed(0)))
        >>> result = compare(make, batches, ["O2"], steps=40, seeds=3, margin=0.1)
        >>> result.verdicts["O2"].kind
        'equivalent'
    """
    dependencies.check("halfstep.compare", dependencies.TO_PREDICT, "scipy")
    require_type("make", make, callable(make), "a function of a seed")
    is_metric = metric is None or callable(metric)
    require_type("metric", metric, is_metric, "a function of a model")
    is_progress = progress is None or callable(progress)
    require_type("progress", progress, is_progress, "a function of a line of text")
    given: Any = batches
    if isinstance(given, Iterator):
        raise UserError(
            f"batches is a {type(batches).__name__}, which the first run uses up; pass "
            "a list, or a function of the seed that returns an iterable."
        )
    is_list = isinstance(batches, Sequence) and len(batches) > 0
    expected = "a list of batches, not empty, or a function of the seed"
    require_type("batches", batches, is_list or callable(batches), expected)
    if steps is None and not is_list:
        raise UserError(
            "steps must be given if batches is a function: how many steps to train."
        )
    count: Any = len(batches) if steps is None else steps  # type: ignore[arg-type]
    name = getattr(metric, "__name__", type(metric).__name__)
    workload = Workload(
        make,
        batches,
        require_int("steps", count, 1),
        metric,
        _LAST_LOSSES if metric is None else name,
        lower_is_better=metric is None,
    )
    return run_comparison(
        workload,
        parse_all(levels),
        seeds,
        margin=margin,
        out=out,
        progress=progress,
    )


def run_comparison(
    workload: Workload,
    candidates: Sequence[Candidate],
    seeds: int | Sequence[int],
    *,
    margin: float | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run what `compare` describes, for any workload."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise UserError(
            f"compare trains in one process, and this is one of {processes}: start it "
            "without torchrun."
        )
    numbers = _seeds(seeds)
    if margin is not None:
        margin = require_positive("margin", margin, "above 0, in units of the metric")
    settings = {
        "steps": workload.steps,
        "metric": workload.metric_name,
        "torch": str(torch.__version__),
        **workload.settings,
    }
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count() if on_gpu else 0
    state = RandomState(torch.device("cuda", index) for index in range(count))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with default_context(device):
            settings |= check_repeatable(workload, numbers[0])
            store = RunStore(out, settings)
            runs = _run_all(workload, candidates, numbers, store, progress)
    finally:
        state.restore()
    reason = "as given"
    if margin is None:
        margin, reason = _default_margin(runs), _MARGIN_REASON
    return Comparison(
        tuple(each.name for each in (PERTURBED, *candidates)),
        numbers,
        workload.metric_name,
        workload.lower_is_better,
        margin,
        reason,
        tuple(runs),
        (*workload.notes, *_conditions()),
    )


def _run_all(
    workload: Workload,
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    store: RunStore,
    progress: Callable[[str], None] | None,
) -> list[Run]:
    """Train each candidate with each seed, unless it is stored."""
    runs: list[Run] = []
    compared = (PERTURBED, *candidates)
    for index, seed in enumerate(seeds):
        # In turn, so that a slow hour of the machine does not fall on one level.
        order = compared[::-1] if index % 2 else compared
        loaded = _stored_runs(store, workload, seed)
        if not index:  # a level that cannot run is reported before hours of training
            first_step = replace(workload, steps=1, metric=None)
            for each in (REFERENCE, *candidates):
                if each.name not in loaded:
                    train(first_step, each, seed)
        reference: Run | None = None
        for candidate in (REFERENCE, *order):
            stored = loaded.get(candidate.name)
            run = stored or train(workload, candidate, seed)
            reference = reference or run
            check_paired(run, reference)
            if run is not stored:
                store.save(run)
            runs.append(run)
            if progress is not None:
                place = f"seed {seed} ({index + 1} of {len(seeds)}), {candidate.name}"
                origin = "" if stored is None else ", from an earlier call"
                progress(f"{place}: {_outcome(run, workload)}{origin}")
    return runs


def _stored_runs(store: RunStore, workload: Workload, seed: int) -> dict[str, Run]:
    """Return level -> run of a seed, of those that began as this call's runs begin."""
    stored = [run for run in store.runs.values() if run.seed == seed]
    if not stored:
        return {}
    start = first_checksums(workload, seed)
    return {
        run.level: run
        for run in stored
        if (run.weights_crc, run.first_batches_crc) == start
    }


def _outcome(run: Run, workload: Workload) -> str:
    if run.diverged:
        return f"diverged: {run.diverged}"
    return (
        f"{workload.metric_name} {run.metric:.4f}, "
        f"{1e3 * statistics.median(run.seconds):.1f} ms a step, "
        f"{run.peak_bytes / MIB:.0f} MiB, {run.skipped} skipped"
    )


def _default_margin(runs: Sequence[Run]) -> float:
    """Return 1 % of fp32's mean metric; NaN if all diverged."""
    bases = [run for run in runs if run.level == REFERENCE.name and not run.diverged]
    mean = statistics.fmean(run.metric for run in bases) if bases else float("nan")
    if mean == 0:
        raise UserError(
            "margin must be given: fp32's mean metric is 0, and so is 1 % of it."
        )
    return _MARGIN_SHARE * abs(mean)


def _seeds(seeds: Any) -> tuple[int, ...]:  # noqa: ANN401
    is_list = isinstance(seeds, Iterable) and not isinstance(seeds, str)
    numbers = tuple(seeds if is_list else range(require_int("seeds", seeds, 0)))
    numbers = tuple(require_int("seeds", seed, 0) for seed in numbers)
    if len(set(numbers)) < max(FEWEST_PAIRS, len(numbers)):
        raise UserError(
            f"seeds={list(numbers) if is_list else seeds} must be {FEWEST_PAIRS} or "
            "more different seeds, or their number: a verdict needs the spread of the "
            "difference over seeds."
        )
    require("seeds", max(numbers), max(numbers) < _SEED_LIMIT, "below 2**31 each")
    return numbers


def _conditions() -> list[str]:
    """Return notes on what makes the comparison less strict."""
    if not torch.cuda.is_available():
        return []
    uses_tf32 = False
    # A program that uses `fp32_precision` must not read the older names.
    with contextlib.suppress(RuntimeError):
        backends = torch.backends.cudnn, torch.backends.cuda.matmul
        uses_tf32 = any(each.allow_tf32 for each in backends)
    return [_MASKS, *([_TF32] if uses_tf32 else [])]

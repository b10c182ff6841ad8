"""The harness for training steps: candidates in processes of their own, in turn.

Each candidate has its own process, because allocator settings are per process, and so
are the kernels that libraries install. One process computes at a time.
"""

from __future__ import annotations

import contextlib
import gc
import platform
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.bench import commands, journal, measure, results
from halfstep.bench.floor import Floor, counting_flops
from halfstep.bench.loops import CANDIDATES, Loop, Task
from halfstep.bench.worker_process import WorkerProcess, reset_peak, resident
from halfstep.diagnostics.preflight.model_copy import SavedBytes
from halfstep.diagnostics.profiling.profile_step import without_kineto_log
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from halfstep.bench.loops import Candidate, LossOf
    from halfstep.reporting.table import Cell, Table

_CANDIDATES = "comma-separated, of those below (default all)"
_TINY = 64
WARM_UP = 3
"""Steps of each seed that are not timed: the first one initializes all state, and the
next `_COUNTED` count what a step does."""
_COUNTED = 2
_PEAK = {
    "cpu": "resident, above what imports and a tiny step left; with batches",
    "cuda": "allocated by torch on the GPU, with batches",
}


DrawBatches: TypeAlias = "Callable[[Namespace, int], Iterator[list[Any]]]"


@dataclass(kw_only=True)
class Training(commands.Bench):
    """A workload that trains a model with each candidate.

    The settings have `device`, `dtype`, `accumulate` and `candidates`.
    """

    run: Callable[[Namespace], list[Table]] = lambda arguments: tables(arguments)  # noqa: PLW0108 -- defined below
    title: str
    kinds: Mapping[str, Candidate]
    """Name -> candidate."""
    make_model: Callable[[Namespace], nn.Module]
    """Builds the model, from torch's random state."""
    draw_batches: DrawBatches
    """(settings, seed) -> the micro-batches of each step, without end."""
    make_optimizer: Callable[[Iterable[Tensor], Namespace], Optimizer]
    loss_of: LossOf
    baselines: tuple[str, ...] = ("torch.amp",)
    """Candidates that the others are compared with; +- is of the first."""
    module: str = __name__
    """Module whose function `worker` runs a candidate."""

    def __post_init__(self) -> None:
        names = commands.names(self.kinds) | {"help": _CANDIDATES}
        self.flags = {**self.flags, "candidates": names, **commands.PLACE}
        self.candidates = {each: kind.description for each, kind in self.kinds.items()}


@dataclass(frozen=True)
class Measured:
    """The measurements of all candidates."""

    times: measure.Times
    """Seconds of a step."""
    facts: dict[str, dict[str, Any]]
    """Candidate -> last answer of its process: loss, memory, FLOPs, casts."""
    absent: dict[str, str]
    """Candidate -> why it did not run."""

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls of one step; some candidates hide theirs."""
        return max((each["flops"] for each in self.facts.values()), default=0.0)


def tables(arguments: Namespace) -> list[Table]:
    """Train with the candidates in turn; return the table of a workload."""
    bench: Any = commands.load(arguments.workload)
    floor = Floor.measure(arguments.device)
    got = measure_steps(arguments)
    rounds = len(next(iter(got.times.rounds.values()), ()))
    first = bench.baselines[0]
    rows = [
        row(name, got, bench.baselines, floor, arguments)
        for name in arguments.candidates
    ]
    missing = {
        each: got.absent.get(each, "not among --candidates").partition(":")[0]
        for each in bench.baselines
        if each not in got.times.rounds
    }
    notes = (
        f"{measure.in_turn(rounds)} to {first}; result: against {first}",
        "O1, O2, O3: levels of halfstep",
        *floor.notes(f"{got.flops / 1e9:.4g}"),
        f"peak: {_PEAK[arguments.device]}",
        "saved: bytes saved for the backward pass of a micro-batch, without weights",
        "casts: copies to another dtype in a step's passes, by torch's profiler",
        "loss: mean over the last tenth of the steps; same weights, batches and seeds",
        "a process each, with OMP_WAIT_POLICY=PASSIVE; kept: hs.machine.keep_memory()",
        *(f"{each} {why}" for each, why in got.absent.items() if ": " in why),
        *(f"x {n}: empty, since {n} did not run: {why}" for n, why in missing.items()),
    )
    return [measure.table(bench.title, rows, notes)]


def row(
    name: str,
    got: Measured,
    baselines: Sequence[str],
    floor: Floor,
    arguments: Namespace,
) -> dict[str, Cell]:
    """Return a candidate's row; its cells are empty if it did not run."""
    times, facts = got.times, got.facts.get(name, {})
    first, *others = baselines
    dtype = "fp32" if name == "fp32" else arguments.dtype
    ms, why = times.median(name, 1e3), got.absent.get(name)
    floor_ms = matmul_ms = None
    if ms and got.flops:
        floor_ms = floor.ms(dtype, got.flops, facts["state_bytes"])
        matmul_ms = floor.ms(dtype, got.flops, 0)
    return {
        "candidate": name,
        "ms a step": ms,
        f"x {first}": times.ratio(name, first),
        **{f"x {each}": times.ratio(name, each) for each in others},
        "+-": times.spread(name, first),
        "result": times.result(name, first),
        "floor ms": floor_ms,
        "of floor": _over(floor_ms, ms),
        "MFU": _over(matmul_ms, ms),
        "peak MiB": _over(facts.get("peak_bytes"), measure.MIB),
        "saved MiB": _over(facts.get("saved_bytes"), measure.MIB),
        "casts": facts.get("casts"),
        "loss": facts.get("loss"),
        "not run": why.partition(":")[0] if why else None,
    }


def _over(value: float | None, unit: float | None) -> float | None:
    return None if value is None or unit is None else value / unit


def measure_steps(arguments: Namespace) -> Measured:
    """Time candidates in turn, each in its process.

    They take `rounds` turns of `steps` steps; or, with `seeds`, for each seed a run of
    `steps` steps, whose turns are single steps.
    """
    bench: Any = commands.load(arguments.workload)
    hardware.gemm_rates(arguments.device)  # once here, not in a candidate's time
    seeds = getattr(arguments, "seeds", None)
    rounds = arguments.steps - WARM_UP if seeds else arguments.rounds
    steps = 1 if seeds else arguments.steps
    absent = {
        each: why
        for each in arguments.candidates
        if (why := why_absent(bench.kinds[each], arguments)) is not None
    }
    seconds = defaultdict[str, list[float]](list)
    losses, last_losses = defaultdict[str, Any](list), defaultdict[str, Any](list)
    facts: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        processes = {
            each: stack.enter_context(_start(each, arguments))
            for each in arguments.candidates
            if each not in absent
        }

        def turn(each: str) -> float:
            answer = processes[each].request({"steps": steps})
            facts[each] |= answer
            journal.record(
                each, loss=answer["losses"][-1], peak_bytes=answer["peak_bytes"]
            )
            losses[each] += answer["losses"]
            return float(answer["seconds"])

        for seed in range(seeds or 1):
            for each in [*processes]:
                facts[each] = processes[each].request({"seed": seed})
                why = facts[each].pop("absent")
                if why is not None:
                    absent[each] = why
                    del processes[each], facts[each]
                if not seed:
                    measure.progress(f"{each}: {why or 'ready'}")
            losses.clear()
            turns = {each: partial(turn, each) for each in processes}
            for each, own in measure.take_turns(turns, rounds).rounds.items():
                seconds[each] += own
                last = losses[each][-max(1, len(losses[each]) // 10) :]
                last_losses[each].append(fmean(last))
            if seeds:
                measure.progress(f"seed {seed + 1}/{seeds}: done")
    for each, answers in facts.items():
        answers["loss"] = fmean(last_losses[each])
    return Measured(measure.Times(seconds), facts, absent)


def why_absent(kind: Candidate, arguments: Namespace) -> str | None:
    """Return why a candidate cannot run here; None if it can."""
    if kind.keeps_memory and arguments.device != "cpu":
        return "of CPU memory only"
    if kind.keeps_memory and platform.libc_ver()[0] != "glibc":
        return "of glibc only"
    return None


def _start(name: str, arguments: Namespace) -> WorkerProcess:
    settings = results.settings(arguments) | {"device": arguments.device}
    task = {"bench": arguments.workload, "candidate": name, "settings": settings}
    module = commands.load(arguments.workload).module  # type: ignore[attr-defined]
    return WorkerProcess(name, module, task)


# In a candidate's process


def make_loop(bench: Training, name: str, work: Namespace, seed: int) -> Loop:
    """Build a candidate; all of one seed start from the same weights."""
    torch.manual_seed(seed)
    model = bench.make_model(work).to(work.device).train()
    optimizer = bench.make_optimizer(model.parameters(), work)
    return bench.kinds[name].loop(Task(model, optimizer, bench.loss_of, work))


class StepServer:
    """Runs one candidate: a request with a seed builds it, others run steps."""

    def __init__(self, bench: Training, name: str, work: Namespace) -> None:
        """Run a tiny step, so that libraries do not count as the candidate's memory.

        torch imports parts of itself in a first step, and transformers its models.
        """
        self._bench, self._name, self._work = bench, name, work
        if bench.kinds[name].keeps_memory:
            hardware.keep_memory()
        with torch.device("meta"):
            bench.make_model(work)
        tiny = nn.Linear(_TINY, _TINY).to(work.device)
        adam = torch.optim.AdamW(tiny.parameters())
        task = Task(tiny, adam, lambda model, x: model(*x).sum(), work)
        loop = CANDIDATES["fp32"].loop(task)
        batch = (torch.ones(1, _TINY, device=work.device),)
        _count(loop, [batch] * work.accumulate)
        reset_peak(work.device)
        self._memory_before = resident(work.device)
        self._loop: Loop | None = None
        self._seed = self._number = 0

    def answer(self, request: Mapping[str, int]) -> dict[str, Any]:
        """Build the candidate of a "seed" and warm up, or run "steps".

        If the candidate does not support the work, the reason is in "absent".
        """
        if "seed" not in request:
            return self._run(request["steps"])
        self._loop = None
        gc.collect()
        self._seed, self._number = request["seed"], 0
        try:
            self._loop = make_loop(self._bench, self._name, self._work, self._seed)
        except UserError as error:
            return {"absent": f"rejected: {error}"}
        self._batches = self._bench.draw_batches(self._work, self._seed)
        self._loop.step(self._next())
        facts = _count(self._loop, self._next())
        reset_peak(self._work.device)  # counting takes memory, and not all are counted
        return {"absent": None} | facts

    def _next(self) -> list[Any]:
        # The same dropout in all processes.
        torch.manual_seed(self._seed * 2**20 + self._number)
        self._number += 1
        return next(self._batches)

    def _run(self, steps: int) -> dict[str, Any]:
        assert self._loop is not None  # noqa: S101 -- it was built
        loop, device = self._loop, self._work.device
        work = [self._next() for _ in range(steps)]
        losses, seconds = measure.timed(lambda: [*map(loop.step, work)], device)
        return {
            "seconds": seconds / steps,
            "losses": [loss.item() for loss in losses],
            "peak_bytes": hardware.peak_memory(device) - self._memory_before,
        }


def _count(loop: Loop, batches: list[Any]) -> dict[str, Any]:
    """Run `_COUNTED` steps; count FLOPs, casts, and the bytes that one works on."""
    saved = casts = None
    flops = 0
    if loop.forward is None:
        for _ in range(_COUNTED):
            loop.step(batches)
    else:
        saved_bytes = SavedBytes(loop.model)
        with saved_bytes.counting():
            loop.forward(batches[0])
        saved = saved_bytes.bytes
        with counting_flops() as counter:
            loop.passes(batches)
        flops = counter.get_total_flops()
        loop.update()
        casts = count_casts(lambda: loop.passes(batches))
        loop.update()
    return {
        "flops": flops,
        "saved_bytes": saved,
        "casts": casts,
        "state_bytes": loop.state_bytes(),
    }


def count_casts(call: Callable[[], object]) -> int:
    """Return how many tensors a call copies to another dtype."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events torch 2.11 warns that events of earlier cycles are lost.
    watch = torch.profiler.profile(activities=cpu, acc_events=True)
    with without_kineto_log(), watch as profile:
        call()
    return sum(event.name == "aten::_to_copy" for event in profile.events() or ())


def worker(bench: str, candidate: str, settings: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the function that answers requests for one candidate."""
    loaded: Any = commands.load(bench)
    return StepServer(loaded, candidate, Namespace(**settings)).answer

"""Profiles training steps and attributes their time to operations, input and waits."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import profile as watch
from torch.autograd.profiler import record_function

from halfstep._torch.profiler_marks import PREFIX
from halfstep.diagnostics.profiling import timeline
from halfstep.diagnostics.profiling.profile_result import (
    FLOATS,
    GEMM,
    LOW,
    Profile,
    Row,
    is_fp32_only,
)
from halfstep.diagnostics.profiling.timeline import DRAIN, FETCH, INPUT, UPDATE
from halfstep.errors import UserError, require, require_int, require_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from halfstep.diagnostics.profiling.timeline import Op, Timeline

_STEP = f"{PREFIX}step"
_Shapes = tuple[tuple[int, ...], ...]


def profile(
    step: Callable[..., object],
    *,
    steps: int = 3,
    warmup: int = 1,
    profiled: int = 2,
    device: str | torch.device | None = None,
    batches: Iterable[Any] | None = None,
    level: str | None = None,
    dtype: str | None = None,
) -> Profile:
    """Run some training steps and report where the time of one goes.

    The steps are real: weights and counters change `warmup + steps + profiled` times.

    Args:
        step: Runs one step. Called without arguments, or with a batch.
        steps: Steps that are timed, >= 1. The default of 3 averages over batches of
            different length.
        warmup: Steps before those, >= 0, for allocation, compilation and caches.
        profiled: Steps under torch's profiler after those, >= 1. The shortest is used:
            other load on the machine only adds time.
        device: The device to synchronize with at the end of the timed steps. Default: a
            GPU if torch has initialized CUDA, else the CPU.
        batches: Source of the argument of `step`, one for each step. A collection is
            iterated again from its start when it ends.
        level: The run's level, such as "O1"; only passed on to the result.
        dtype: The run's format. Default: that of most of the matmul time.

    Raises:
        UserError: If an argument is of the wrong type or out of range, or `batches` run
            out.
    """
    require_type("step", step, callable(step), "a function that makes one step")
    require_int("steps", steps, 1)
    require_int("profiled", profiled, 1)
    require_int("warmup", warmup, 0)
    many = batches is None or hasattr(batches, "__iter__")
    many = many or hasattr(batches, "__getitem__")
    require_type("batches", batches, many, "a collection of batches, or an iterator")
    run = _Runner(step, batches, _device(device))
    for _ in range(warmup):
        run.once()
    run.drain()
    run.fetched = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        run.once()
    run.drain()
    wall = (time.perf_counter() - began) / steps
    fetched = run.fetched / steps if batches is not None else None
    step_timeline = watched(run.profiled_step, profiled, cuda=run.device == "cuda")
    return summary(step_timeline, wall, fetched, level=level, dtype=dtype)


def watched(
    step: Callable[[], object], times: int = 1, *, cuda: bool = False
) -> Timeline:
    """Run steps under the profiler and return the shortest, the least disturbed."""
    plain, device = _calls(), "cuda" if cuda else None
    # Without use_kineto there are no events of kernels.
    watching = watch(record_shapes=True, use_device=device, use_kineto=cuda)
    with without_kineto_log(), watching as seen:
        slower = _calls() - plain
        for _ in range(times):
            with record_function(_STEP):
                step()
    results = seen.kineto_results
    # On a GPU kernel times are used, which the profiler does not slow down.
    cost = 0.0 if cuda else max(0.0, slower) / (_CALLS * _EVENTS)
    timelines = timeline.read(results.events() if results else (), _STEP, cost)
    return min(timelines, key=lambda each: each.length - each.fetched)


_CALLS, _EVENTS = 100, 3
"""Number of calls of `Tensor.t`, and of the profiler's nested events for each."""


def _calls() -> float:
    """Return the nanoseconds of `_CALLS` trivial calls, the minimum of 9 runs."""
    x = torch.ones(1, 1)
    times = []
    for _ in range(9):
        began = time.perf_counter_ns()
        for _ in range(_CALLS):
            x.t()
        times.append(time.perf_counter_ns() - began)
    return float(min(times))


def summary(
    seen: Timeline,
    wall: float | None = None,
    fetched: float | None = None,
    *,
    level: str | None = None,
    dtype: str | None = None,
) -> Profile:
    """Return the profile of a step from its timeline.

    Args:
        seen: The timeline of the step under the profiler.
        wall: Seconds of a step without the profiler. None: the timeline's length.
        fetched: Seconds of `wall` spent on input. None: the timeline's share.
        level: The run's level.
        dtype: The run's format. None: that of most of the matmul time.
    """
    length = seen.length / 1e9
    wall = length if wall is None else wall
    factor = wall / length
    if fetched is not None and not seen.busy:
        # Ratio of the times without input.
        factor = (wall - fetched) / max(length - seen.fetched / 1e9, 1e-9)
    else:
        fetched = seen.fetched / 1e9 * factor
    passes = [op for op in seen.ops if op.part != FETCH]
    dtype = dtype or _prevalent(passes)

    def seconds(ops: Iterable[Op]) -> float:
        return sum(op.own for op in ops) / 1e9 * factor

    casts = [
        op
        for op in passes
        if op.name == "copy_" and len(FLOATS.intersection(op.dtypes)) > 1
    ]
    wide = [
        op for op in passes if op.part != UPDATE and is_fp32_only(op.name, op.dtypes)
    ]
    return Profile(
        wall_s=wall,
        rows=_rows(passes, factor),
        casts_s=seconds(casts),
        gemm_s=seconds(op for op in passes if GEMM.fullmatch(op.name)),
        fp32_only_s=seconds(wide) * (dtype in LOW),
        update_s=seconds(op for op in passes if op.part == UPDATE),
        python_s=seen.idle / 1e9 * factor,
        waits=len(seen.waiting),
        wait_s=seen.inside(seen.waiting) / 1e9 * factor,
        input_s=fetched,
        device="cuda" if seen.busy else "cpu",
        level=level,
        dtype=dtype,
        optimizer=next(iter(seen.optimizers)) if len(seen.optimizers) == 1 else None,
    )


def _prevalent(ops: Iterable[Op]) -> str:
    """Return the float format of most of the matmul time."""
    spent: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.dtypes and GEMM.fullmatch(op.name) and op.dtypes[-1] in FLOATS:
            spent[op.dtypes[-1]] += op.own
    return max(spent, key=spent.__getitem__, default="fp32")


def _rows(ops: Iterable[Op], factor: float) -> tuple[Row, ...]:
    groups: dict[tuple[str, _Shapes, tuple[str, ...]], list[Op]] = defaultdict(list)
    for op in ops:
        groups[op.name, op.shapes, op.dtypes].append(op)
    rows = (
        Row(*key, len(group), sum(op.own for op in group) / 1e9 * factor)
        for key, group in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.self_s))


class _Runner:
    """Runs steps, and fetches a batch for each if `batches` is given."""

    def __init__(
        self,
        step: Callable[..., object],
        batches: Iterable[Any] | None,
        device: torch.device,
    ) -> None:
        self.device = device.type
        self.fetched = 0.0
        """Seconds spent on fetching so far."""
        self._step = step
        self._source = None if batches is None else _endless(batches)

    def once(self) -> None:
        """Run one step."""
        batch: tuple[Any, ...] = ()
        if self._source is not None:
            began = time.perf_counter()
            with record_function(INPUT):
                batch = (next(self._source),)
            self.fetched += time.perf_counter() - began
        self._step(*batch)

    def profiled_step(self) -> None:
        """Run one step up to the end of the device's work."""
        self.once()
        with record_function(DRAIN):
            self.drain()

    def drain(self) -> None:
        """Synchronize with the device."""
        if self.device != "cpu":
            getattr(torch, self.device).synchronize()


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, from the start again at their end."""
    ended = False
    while not ended:
        ended = True
        for batch in batches:
            ended = False
            yield batch
    raise UserError("batches ran out: give a collection, or an iterator that has more.")


def _device(given: str | torch.device | None) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    right = "that of a device here, such as 'cpu' or 'cuda'"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    backend = getattr(torch, device.type, None)
    is_available = getattr(
        backend, "is_available", lambda: hasattr(backend, "synchronize")
    )
    require("device", given, is_available(), right)
    return device


@contextlib.contextmanager
def without_kineto_log() -> Iterator[None]:
    """Suppress the log lines of Kineto, the profiler's library, on stderr.

    Its level can only be set by an environment variable, which is read when Kineto
    first logs. A value set by the user is kept.
    """
    name = "KINETO_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]

"""Builds the timeline of a training step from the events of torch's profiler."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch._C._autograd import DeviceType

from halfstep._torch import profiler_marks
from halfstep._torch.profiler_marks import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Begin and end, in nanoseconds of the profiler's clock."""

INPUT, DRAIN = f"{PREFIX}input", f"{PREFIX}drain"
"""Profiler marks: fetching a batch; the synchronization that ends a timed step."""

UPDATE, FETCH = "update", "input"
"""Parts of a step, as values of `Op.part`."""

_WORDS = {
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "double": "float64",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "unsigned char": "uint8",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
"""Dtype name of the profiler, which is that of C++ -> halfstep's name."""

_NO_TENSOR = {"", "Scalar", "ScalarList", "TensorList", "GenericList"}
_ENGINE = ("autograd::", "torch::autograd::", PREFIX)
_WAITS = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|.*[zZ]eEventHostSync.*"
)
_READS = re.compile("aten::_local_scalar_dense")
_FETCHES = ("enumerate(DataLoader)#", INPUT)
_OPTIMIZER = re.compile(r"Optimizer\.step#(.*)\.step")
_UPDATES = ("Optimizer.step#", profiler_marks.UPDATE)
_COVERS = ("## Call CompiledFxGraph", profiler_marks.UPDATE)
"""Prefixes of events without events of their kernels: compiled graphs; halfstep's C
kernels."""


@dataclass(slots=True)
class Op:
    """One call of one operation."""

    name: str
    """Dispatcher name without "aten::"."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensor operands, in order; lists of tensors are left out."""
    dtypes: tuple[str, ...]
    """Dtypes of the same, such as "bf16" and "int64"."""
    own: float
    """Self time in nanoseconds; on a GPU, the time of its kernels."""
    part: str
    """`UPDATE`, `FETCH`, or "" for the passes."""


@dataclass
class Timeline:
    """One step: its span, and the spans of what ran in it, in nanoseconds."""

    span: Span
    ops: list[Op] = field(default_factory=list)
    covered: list[Span] = field(default_factory=list)
    """Spans in which the host ran an operation or a halfstep kernel."""
    busy: list[Span] = field(default_factory=list)
    """Spans in which the GPU ran; empty without one."""
    fetching: list[Span] = field(default_factory=list)
    """Spans in which the host fetched a batch."""
    waiting: list[Span] = field(default_factory=list)
    """Host-device synchronizations; on a CPU, reads of a scalar from a tensor."""
    between: float = 0.0
    """Time of the profiler itself, outside of operations and fetching."""
    idle: float = 0.0
    """Time outside of operations and fetching; on a GPU, its idle time."""
    fetched: float = 0.0
    """Time of fetching; on a GPU, only while it was idle."""
    length: float = 0.0
    """Total time, without that of the profiler itself."""
    optimizers: set[str] = field(default_factory=set)
    """Classes of the optimizers whose `step` was called."""

    def inside(self, spans: Iterable[Span]) -> int:
        """Return how many nanoseconds of the step are in the union of `spans`."""
        begin, end = self.span
        cut = [(max(a, begin), min(b, end)) for a, b in spans]
        return total((a, b) for a, b in cut if a < b)

    def finish(self) -> None:
        """Compute the totals after all events were added."""
        step_ns = self.span[1] - self.span[0]
        for op in self.ops:
            # The subtracted time of the profiler is an estimate and may be too large.
            op.own = max(0.0, op.own)
        if self.busy:
            taken = self.inside([*self.busy, *self.fetching])
            self.fetched = taken - self.inside(self.busy)
            self.idle, self.length = step_ns - taken, step_ns
            return
        self.fetched = self.inside(self.fetching)
        outside = step_ns - self.inside([*self.covered, *self.fetching])
        self.idle = max(0.0, outside - self.between)
        in_ops = sum(op.own for op in self.ops if op.part != FETCH)
        self.length = in_ops + self.idle + self.fetched


def total(spans: Iterable[Span]) -> int:
    """Return the length of the union of some spans.

    >>> total([(0, 3), (2, 5), (7, 8)])
    6
    """
    length, reached = 0, -math.inf
    for begin, end in sorted(spans):
        if end > reached:
            length += end - int(max(begin, reached))
            reached = end
    return length


def read(events: Sequence[Any], region: str, cost: float = 0.0) -> list[Timeline]:
    """Return a timeline for each event named `region`, in nanoseconds.

    The profiler records an event before the event's begin, so the time for it counts
    as the caller's and would look like Python overhead; `cost`, the nanoseconds that it
    takes, corrects that.
    """
    on_host, on_device = [], []
    for event in events:
        if event.device_type() == DeviceType.CPU:
            on_host.append(event)
        elif not event.is_user_annotation():
            on_device.append(event)
    steps = [
        Timeline((event.start_ns(), event.end_ns()))
        for event in on_host
        if event.name() == region
    ]
    steps.sort(key=lambda step: step.span)
    kernels: dict[int, int] = defaultdict(int)
    for event in on_device:
        kernels[event.linked_correlation_id()] += event.duration_ns()
        step = _step_at(steps, event.start_ns())
        if step is not None:
            step.busy.append((event.start_ns(), event.end_ns()))
    threads = defaultdict(list)
    for event in on_host:
        threads[event.start_thread_id()].append(event)
    for thread in threads.values():
        thread.sort(key=lambda each: (each.start_ns(), -each.end_ns()))
        _assign(thread, steps, kernels if on_device else None, cost)
    for step in steps:
        step.finish()
    return steps


def _step_at(steps: Sequence[Timeline], moment: int) -> Timeline | None:
    ran = (step for step in steps if step.span[0] <= moment < step.span[1])
    return next(ran, None)


@dataclass(slots=True)
class _Open:
    """An event that contains the current one."""

    end: int
    part: str = ""
    in_op: bool = False
    drains: bool = False
    op: Op | None = None


def _assign(
    events: Iterable[Any],
    steps: Sequence[Timeline],
    kernels: dict[int, int] | None,
    cost: float,
) -> None:
    """Assign the nested events of one thread, in the order of begin times, to steps."""
    stack: list[_Open] = []
    waits = _READS if kernels is None else _WAITS

    def charge(spent: float) -> None:
        """Subtract time of the host from the innermost open operation."""
        caller = next((each.op for each in reversed(stack) if each.op), None)
        if caller is not None and kernels is None:
            caller.own -= spent

    for event in events:
        begin, end, name = event.start_ns(), event.end_ns(), event.name()
        while stack and stack[-1].end <= begin:
            stack.pop()
        step = _step_at(steps, begin)
        if step is None:
            continue
        outer = stack[-1] if stack else _Open(0)
        part = UPDATE if name.startswith(_UPDATES) else outer.part
        entry = _Open(end, part, outer.in_op, outer.drains or name == DRAIN)
        step.optimizers.update(_OPTIMIZER.findall(name))
        if name.startswith(_FETCHES):
            entry.part = FETCH
            step.fetching.append((begin, end))
        step.between += cost * (entry.part != FETCH and not entry.in_op)
        charge(cost)
        if waits.fullmatch(name) and not entry.drains:
            step.waiting.append((begin, end))
        if _is_op(event, name):
            entry.op = _op_of(event, name, entry.part, kernels)
            step.ops.append(entry.op)
            charge(end - begin)
            if not entry.in_op:
                entry.in_op = True
                step.covered.append((begin, end))
        stack.append(entry)


def _is_op(event: Any, name: str) -> bool:  # noqa: ANN401 -- torch's own class
    called = "::" in name and not name.startswith(_ENGINE)
    called = called and not event.is_user_annotation()
    return called or name.startswith(_COVERS)


def _op_of(event: Any, name: str, part: str, kernels: dict[int, int] | None) -> Op:  # noqa: ANN401
    tensors = [
        (tuple(shape), _WORDS.get(dtype, dtype))
        for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
        if dtype not in _NO_TENSOR
    ]
    own: float = event.duration_ns()
    if kernels is not None:
        own = kernels.get(event.correlation_id(), 0)
    return Op(
        name.removeprefix("aten::"),
        tuple(shape for shape, _ in tensors),
        tuple(dtype for _, dtype in tensors),
        own,
        part,
    )

"""Hooks of a probe on modules, on gradients, and at the end of a backward pass.

Each tensor is measured once and recorded under the names of all modules that return it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from halfstep._torch import async_read
from halfstep.numerics.formats import tensors_in
from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.tensor_counts import DTYPES, Counts, add_

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from halfstep.numerics.formats import FloatFormat

    _Hook = Callable[[nn.Module, Any, Any], None]

Key = tuple[int, str]
"""Index of a name, and the dtype observed under it."""
FlagOrStats = bool | Tensor | tuple[Counts, str] | None
"""Result for one tensor: whether it is non-finite (CPU); its largest magnitude, shape
(), which needs no synchronization (GPU); or its counts and dtype. None if not float."""
_WORDS = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_SUM_DTYPES = {dtype: dtype for dtype in DTYPES} | {torch.float16: torch.float32}


def _floats(tensor: Tensor) -> Tensor | None:
    """Return the values as a dense real tensor; None if empty or not floating."""
    values = tensor.detach()
    # A nested tensor may report a strided layout although it has no shape.
    plain = type(values) is Tensor and values.layout is torch.strided
    if not plain or values.is_nested:
        values = dense_values(values)
        values = values.values() if values.is_nested else values
    if values.dtype in DTYPES:
        return values if values.numel() else None
    if values.is_complex():
        return _floats(torch.view_as_real(values.resolve_conj()))
    return None


def _sum_is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor's sum is finite, which implies that each value is.

    A sum takes a third of the time of `aminmax`.
    """
    total: float = tensor.sum(dtype=_SUM_DTYPES[tensor.dtype]).item()
    return total - total == 0


def _is_nonfinite(values: Tensor) -> bool:
    if _sum_is_finite(values):
        return False
    low, high = torch.aminmax(values)  # the sum may only have overflowed
    return not (bool(low.isfinite()) and bool(high.isfinite()))


_NO_BACKWARD = -1
"""torch's id of the current backward pass if none is running."""


class StepRecords:
    """Flags of the tensors observed since `clear`; with `full`, their statistics.

    Values stay on the device until the probe copies them to the host.
    """

    def __init__(self, casts: tuple[FloatFormat, ...], *, full: bool) -> None:
        self._casts = casts
        self.full = full
        self.clear()

    def clear(self) -> None:
        """Remove all records."""
        self.order: dict[int, None] = {}
        """Indices of names in the order in which they were first observed."""
        self.nonfinite: dict[int, bool] = {}
        """Index of a name -> whether it was non-finite."""
        self.peaks: list[tuple[int, Tensor]] = []
        """Index of a name, and largest magnitude on the device, shape ()."""
        self.stats: dict[Key, Counts] = {}

    def measure(self, tensor: Tensor) -> FlagOrStats:
        """Return the flag or statistics of one tensor; None if it is not floating."""
        values = _floats(tensor)
        if values is None:
            return None
        with torch._C._DisableAutocast():  # noqa: SLF001 -- it would cast first
            if self.full:
                counts = Counts.zeros(len(self._casts), values.device)
                add_(counts, values, self._casts)
                return counts, _WORDS[values.dtype]
            if values.device.type in async_read.READABLE_DEVICES:
                return _is_nonfinite(values)
            # One kernel; its result is non-finite if a value is.
            peak: Tensor = torch.linalg.vector_norm(values, torch.inf)
            return peak

    def record(
        self, number: int, flag_or_stats: FlagOrStats, *, replace: bool = False
    ) -> None:
        """Record a result of `measure` under a name; add to or replace earlier ones."""
        self.order.setdefault(number)
        if isinstance(flag_or_stats, bool):
            self.nonfinite[number] = flag_or_stats or self.nonfinite.get(number, False)
        elif isinstance(flag_or_stats, Tensor):
            self.peaks.append((number, flag_or_stats))
        elif flag_or_stats is not None:
            counts, dtype = flag_or_stats
            before = None if replace else self.stats.get((number, dtype))
            self.stats[number, dtype] = counts if before is None else before.add(counts)

    @torch.no_grad()
    def measure_all(self, named: Sequence[tuple[int, Tensor]]) -> None:
        """Measure and record several tensors; for flags, all of one dtype together.

        Uses one kernel on a GPU, and one `item` on a CPU if all are finite.
        """
        groups: defaultdict[object, list[tuple[int, Tensor]]] = defaultdict(list)
        for number, tensor in named:
            if self.full:
                self.record(number, self.measure(tensor), replace=True)
            elif (values := _floats(tensor)) is not None:
                self.order.setdefault(number)
                groups[values.device, values.dtype].append((number, values))
        for group in groups.values():
            numbers, tensors = zip(*group, strict=True)
            if tensors[0].device.type not in async_read.READABLE_DEVICES:
                norms = torch._foreach_norm(tensors, torch.inf)  # noqa: SLF001
                self.peaks += zip(numbers, norms, strict=True)
                continue
            dtype = _SUM_DTYPES[tensors[0].dtype]
            finite = _sum_is_finite(torch.stack([t.sum(dtype=dtype) for t in tensors]))
            for number, tensor in group:
                self.record(number, not finite and _is_nonfinite(tensor))

    def flags(self) -> tuple[list[int], list[Tensor]]:
        """Return indices, perhaps repeated, and their flags by dtype and device."""
        order, flags = list(self.nonfinite), []
        if self.nonfinite:
            flags.append(torch.tensor(list(self.nonfinite.values())))
        groups: defaultdict[object, list[tuple[int, Tensor]]] = defaultdict(list)
        for number, peak in self.peaks:
            groups[peak.device, peak.dtype].append((number, peak))
        for group in groups.values():
            order += [number for number, _ in group]
            flags.append(~torch.isfinite(torch.stack([peak for _, peak in group])))
        return order, flags


class _Output:
    __slots__ = ("flag_or_stats", "modules", "ref", "requires_grad", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        # An inference tensor has no version, so writes to it cannot be detected.
        self.version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
        self.requires_grad = tensor.grad_fn is not None
        self.modules: list[int] = []
        """Indices of the modules that returned it."""
        self.flag_or_stats: FlagOrStats = None

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Return whether this is the same tensor, with the same values and graph.

        Reentrant checkpointing adds the graph of an output later.
        """
        return (
            self.ref() is tensor
            and self.version is not None
            and self.version == tensor._version  # noqa: SLF001
            and self.requires_grad == (tensor.grad_fn is not None)
        )


class Hooks:
    """Records a model's outputs and gradients in `records`, until `detach`."""

    def __init__(
        self, model: nn.Module, casts: tuple[FloatFormat, ...], *, full: bool
    ) -> None:
        """Attach to every module; `full`: record statistics instead of flags."""
        self.model = model
        self.modules = modules_of(model)
        self.records = StepRecords(casts, full=full)
        self.on = True
        """Whether attached and not paused."""
        self.sampling = True
        """Whether this step is observed."""
        self._parameters = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in self.modules
            for name in module._parameters  # noqa: SLF001
        ]
        paths = [path or "model" for path, _ in self.modules]
        self.names: tuple[str, ...] = (
            *(f"{path}:output" for path in paths),
            *(f"{path}:grad" for path in paths),
            *(f"{name}:grad" for name, _, _ in self._parameters),
        )
        """Index -> name."""
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._outputs: dict[int, _Output] = {}
        """id() of a tensor -> its record."""
        self._end_queued = False
        _attached.add(self)
        self._handles = [
            module.register_forward_hook(self._hook(number))
            for number, (_, module) in enumerate(self.modules)
        ]

    @property
    def attached(self) -> bool:
        """Whether the hooks are registered: `detach` was not called."""
        return bool(self._handles)

    def unobserved(self, observed: Container[int]) -> str | None:
        """Return the path of a compiled module with no observed index, or None."""
        seen = {path: n in observed for n, (path, _) in enumerate(self.modules)}
        if not any(seen.values()):
            return "the model"
        for path, module in self.modules:
            # A module compiled by torch.compile.
            attributes = module._modules, module._compiled_call_impl  # noqa: SLF001
            inside = [seen[each] for each in seen if each.startswith(f"{path}.")]
            is_compiled = "_orig_mod" in attributes[0] or attributes[1] is not None
            if is_compiled and inside and not any(inside):
                return repr(path)
        return None

    def detach(self) -> None:
        """Remove all hooks."""
        self.on = False
        _attached.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._outputs = {}

    def begin(self, *, sampling: bool) -> None:
        """Clear the records and begin a step."""
        self.sampling = sampling
        self.records.clear()
        self._outputs = {}
        self._end_queued = False

    def _hook(self, number: int) -> _Hook:
        hooked = self.modules[number][1]

        def hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
            del args
            # deepcopy of a module copies its hooks
            if module is hooked and self.on and self.sampling:
                self._observe_output(number, output)

        why = (
            "halfstep.Probe reads outputs between graphs; detach it for fullgraph=True"
        )
        disabled: _Hook = torch.compiler.disable(hook, reason=why)  # type: ignore[no-untyped-call]
        return disabled

    def _observe_output(self, number: int, output: Any) -> None:  # noqa: ANN401
        """Measure a module's outputs and register hooks on their gradients."""
        in_backward = torch._C._current_graph_task_id() != _NO_BACKWARD  # noqa: SLF001
        if not in_backward:  # the last pass may have ended with an error
            self._end_queued = False
        for tensor in (output,) if type(output) is Tensor else tensors_in(output):
            seen = self._outputs.get(id(tensor))
            if seen is None or not seen.is_unchanged(tensor):
                seen = self._outputs[id(tensor)] = _Output(tensor)
                if seen.requires_grad:
                    hook = partial(self._observe_grad, seen)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                if not in_backward:
                    seen.flag_or_stats = self.records.measure(tensor)
            seen.modules.append(number)
            # Checkpointing recomputes outputs in the backward pass; in the forward
            # pass they may have no graph.
            if not in_backward:
                self.records.record(number, seen.flag_or_stats)

    def _observe_grad(self, output: _Output, gradient: Tensor) -> None:
        if not (self.on and self.sampling):
            return
        flag_or_stats = self.records.measure(gradient)
        for number in output.modules:
            self.records.record(number + len(self.modules), flag_or_stats)
        if not self._end_queued:
            self._end_queued = True
            # Queue a callback from a callback: those of DDP and FSDP, which finish the
            # gradients, may be queued after this one and must run before.
            queue = Variable._execution_engine.queue_callback  # noqa: SLF001
            queue(partial(queue, self._read_parameter_grads))

    def _read_parameter_grads(self) -> None:
        self._end_queued = False
        grads = [
            (number, gradient)
            for number, (_, module, name) in enumerate(
                self._parameters, 2 * len(self.modules)
            )
            if (parameter := module._parameters.get(name)) is not None  # noqa: SLF001
            and (gradient := parameter.grad) is not None
        ]
        self.records.measure_all(grads)


_attached: weakref.WeakSet[Hooks] = weakref.WeakSet()


@contextlib.contextmanager
def all_paused() -> Iterator[None]:
    """Pause the probes of all models."""
    before = [(hooks, hooks.on) for hooks in _attached]
    for hooks, _ in before:
        hooks.on = False
    try:
        yield
    finally:
        for hooks, on in before:
            hooks.on = on and hooks.attached


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) pairs, each module once, children before parents.

    Scripted modules are left out, because they cannot have hooks.
    """
    modules: list[tuple[str, nn.Module]] = []
    visited: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        visited.add(id(module))
        for name, child in module.named_children():
            if id(child) not in visited and not isinstance(
                child, torch.jit.ScriptModule
            ):
                visit(f"{path}.{name}" if path else name, child)
        modules.append((path, module))

    visit("", model)
    return modules

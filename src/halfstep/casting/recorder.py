"""Records the operations of an autocast context for `report()`.

In: operations as they run. Out: a `Table` with operation, module, dtypes in and out,
the rule that decided, its reason, and numbers of calls, casts and bytes cast.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree

from halfstep._torch.dispatch_mode import DispatchMode
from halfstep.distributed import ddp
from halfstep.numerics import formats
from halfstep.policy.decision import decide
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from halfstep.casting.active_context import CastContext

_COLUMNS = (
    *("operation", "module", "in", "out", "rule", "reason"),
    *("calls", "casts", "bytes cast"),
)
_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001


@dataclass(slots=True)
class _CallCounts:
    """Number of calls, and of the casts made for them."""

    calls: int = 0
    casts: int = 0
    bytes: int = 0


class _Thread(threading.local):
    """State of one thread: modules entered, operation that is running."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.paths: dict[int, str] = {}
        self.modes: list[_Mode] = []
        self.counts: _CallCounts | None = None


class Recorder:
    """Records operations on one device; costs some tens of microseconds per call."""

    def __init__(self, device: str) -> None:
        """Start empty."""
        self._device = device
        self._counts: dict[tuple[str, ...], _CallCounts] = {}
        self._thread = _Thread()
        self._hooks: list[RemovableHandle] = []
        self._open = 0

    def __reduce__(self) -> tuple[type[Recorder], tuple[str]]:
        """Make objects with a recorder copyable and picklable; a copy is empty."""
        return Recorder, (self._device,)

    def start(self) -> None:
        """Start to record the operations and modules of this thread."""
        if not self._open:
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
        self._open += 1
        mode = _Mode(self)
        mode.__enter__()
        self._thread.modes.append(mode)

    def stop(self) -> None:
        """Stop recording; must be called once per `start`."""
        thread = self._thread
        if not thread.modes:  # interrupted before it started
            return
        thread.modes.pop().__exit__(None, None, None)
        if not thread.modes:
            thread.modules.clear()
        self._open -= 1
        if not self._open:
            for hook in self._hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _args: object) -> None:
        thread = self._thread
        if not thread.modules:
            root = ddp.unwrap(module)
            thread.paths = {id(m): path for path, m in root.named_modules()}
        thread.modules.append(module)

    def _leave(self, module: nn.Module, _args: object, _output: object) -> None:
        # A module that was called before the recording started was not entered.
        modules = self._thread.modules
        if modules and modules[-1] is module:
            modules.pop()

    def observe(
        self,
        name: str,
        context: CastContext,
        run: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation and record it."""
        if not self._open:
            return run()  # recomputed in a backward pass
        thread = self._thread
        outer, thread.counts = thread.counts, _CallCounts(calls=1)
        cache = context.cache
        before = (0, 0) if cache is None else (cache.misses, cache.bytes_cast)
        try:
            output = run()
            counts = thread.counts
        finally:
            thread.counts = outer
        if cache is not None:
            counts.casts += cache.misses - before[0]
            counts.bytes += cache.bytes_cast - before[1]
        dtypes = _dtypes(arguments)
        decision = decide(
            name,
            dtypes,
            self._device,
            policy=context.policy,
            low=torch.get_autocast_dtype(self._device),
            module=context.module,
            types=context.types,
        )
        self._add(name, dtypes, output, decision.row, decision.reason, counts)
        return output

    def observe_below_autograd(
        self, func: torch._ops.OpOverload, args: object, output: object
    ) -> None:
        """Record an operation below autograd, unless it is part of a larger one."""
        dtypes, out_dtypes = _dtypes(args), _dtypes(output)
        is_cast = func is _CAST and dtypes and out_dtypes and dtypes != out_dtypes
        size = sum(out.nbytes for out in _tensors(output)) if is_cast else 0
        if self._thread.counts is not None:
            self._thread.counts.casts += bool(is_cast)
            self._thread.counts.bytes += size
            return
        returns_view = any(out.alias_info for out in func._schema.returns)  # noqa: SLF001
        if returns_view or not (dtypes and out_dtypes):
            return
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        overload = func._overloadname  # noqa: SLF001
        if overload != "default":
            name = f"{name}.{overload}"
        counts = _CallCounts(1, int(bool(is_cast)), size)
        reason = "a cast in the code" if is_cast else "it runs as it is called"
        self._add(name, dtypes, output, "no row", reason, counts)

    def _add(
        self,
        name: str,
        dtypes: list[torch.dtype],
        output: object,
        row: str,
        reason: str,
        counts: _CallCounts,
    ) -> None:
        thread = self._thread
        path = ""
        if thread.modules:
            inner = thread.modules[-1]
            path = thread.paths.get(id(inner), type(inner).__name__)
        key = (name, path, _words(dtypes), _words(_dtypes(output)), row, reason)
        total = self._counts.setdefault(key, _CallCounts())
        total.calls += counts.calls
        total.casts += counts.casts
        total.bytes += counts.bytes

    @property
    def has_records(self) -> bool:
        """Whether any operation was recorded."""
        return bool(self._counts)

    def table(self) -> Table:
        """Return the records, in the order of first calls."""
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (*key, counts.calls, counts.casts, counts.bytes)
            for key, counts in self._counts.items()
        )
        total = sum(counts.bytes for counts in self._counts.values())
        casts = sum(counts.casts for counts in self._counts.values())
        notes = (f"{casts} casts in total, which wrote {total:,} bytes",)
        return Table("Recorded operations", _COLUMNS, rows, notes)


class _Mode(DispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operation of a thread to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        output = func(*args, **(kwargs or {}))
        self._recorder.observe_below_autograd(func, (args, kwargs), output)
        return output


def _tensors(value: object) -> list[Tensor]:
    leaves = _pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _dtypes(value: object) -> list[torch.dtype]:
    return [tensor.dtype for tensor in _tensors(value)]


def _words(dtypes: list[torch.dtype]) -> str:
    """Return the names of dtypes, without duplicates."""
    return ", ".join(dict.fromkeys(map(formats.word, dtypes)))

"""Records the operations of an autocast context, for `report()`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree

from halfstep._torch.dispatch_mode import DispatchMode, returns_view
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

    def add(self, other: _CallCounts) -> None:
        self.calls += other.calls
        self.casts += other.casts
        self.bytes += other.bytes


@dataclass
class OperationRecord:
    """The operations that ran in a context, over all times it was entered."""

    counts: dict[tuple[str, ...], _CallCounts] = field(default_factory=dict)
    """The first columns of a row -> its last ones, in the order of first calls."""

    def table(self) -> Table:
        """Return a row for each operation, module, dtypes and rule."""
        total = _CallCounts()
        for counts in self.counts.values():
            total.add(counts)
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (*key, counts.calls, counts.casts, counts.bytes)
            for key, counts in self.counts.items()
        )
        notes = (f"{total.casts} casts in total, which wrote {total.bytes:,} bytes",)
        return Table("Recorded operations", _COLUMNS, rows, notes)


class _Thread(threading.local):
    """The modules that a thread is in, and the operation that it runs."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.paths: dict[int, str] = {}
        self.counts: _CallCounts | None = None


class RecordingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Adds to a record from `start` to `stop`; some tens of microseconds per call.

    Operations that a table or rule of the policy decides about are recorded where they
    are cast, by `observe`; all others below autograd, by `run`.
    """

    def __init__(self, record: OperationRecord, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._device = device
        self._thread = _Thread()
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Start to record in this thread."""
        self.__enter__()
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Stop; without effect if it was interrupted before it started."""
        if self._hooks:
            self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

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
        call: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation at the dispatch key of the policy, and record it."""
        if not self._hooks:
            return call()  # recomputed in a backward pass
        thread, cache = self._thread, context.cache
        before = (0, 0) if cache is None else (cache.misses, cache.bytes_cast)
        counts = _CallCounts(calls=1)
        outer, thread.counts = thread.counts, counts
        try:
            output = call()
        finally:
            thread.counts = outer
        if cache is not None:  # it hides its casts from modes
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

    def run(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an operation below autograd; record it, or its casts for an outer one."""
        output = func(*args, **kwargs)
        dtypes, out_dtypes = _dtypes((args, kwargs)), _dtypes(output)
        is_cast = func is _CAST and dtypes and out_dtypes and dtypes != out_dtypes
        counts, reason = _CallCounts(), "it runs as it is called"
        if is_cast:
            counts = _CallCounts(0, 1, sum(out.nbytes for out in _tensors(output)))
            reason = "a cast in the code"
        if self._thread.counts is not None:
            self._thread.counts.add(counts)
        elif dtypes and out_dtypes and not returns_view(func):
            counts.calls = 1
            name = str(func).removeprefix("aten.").removesuffix(".default")
            self._add(name, dtypes, output, "no row", reason, counts)
        return output

    def _add(
        self,
        name: str,
        dtypes: list[torch.dtype],
        output: object,
        row: str,
        reason: str,
        counts: _CallCounts,
    ) -> None:
        path, thread = "", self._thread
        if thread.modules:
            inner = thread.modules[-1]
            path = thread.paths.get(id(inner), type(inner).__name__)
        key = (name, path, _words(dtypes), _words(_dtypes(output)), row, reason)
        self._record.counts.setdefault(key, _CallCounts()).add(counts)


def _tensors(value: object) -> list[Tensor]:
    leaves = _pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _dtypes(value: object) -> list[torch.dtype]:
    return [tensor.dtype for tensor in _tensors(value)]


def _words(dtypes: list[torch.dtype]) -> str:
    """Return the names of dtypes, without duplicates."""
    return ", ".join(dict.fromkeys(map(formats.word, dtypes)))

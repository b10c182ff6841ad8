"""What ran how: the operations of a region, observed.

In: operations as they run. Out: a `Table` with a row for each kind of call: operation,
module, formats in and out, the rule that decided and why, calls, casts and their size.
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

    from halfstep.casting.active_context import Frame

_COLUMNS = (
    "operation",
    "module",
    "in",
    "out",
    "rule",
    "reason",
    "calls",
    "casts",
    "bytes cast",
)
_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001


@dataclass(slots=True)
class _Tally:
    """How often something ran, and what was cast for it."""

    calls: int = 0
    casts: int = 0
    bytes: int = 0


class _Thread(threading.local):
    """Where one thread is: modules entered, operation under way."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.paths: dict[int, str] = {}
        self.modes: list[_Mode] = []
        self.tally: _Tally | None = None


class Recorder:
    """Observes regions on one device; costs some tens of microseconds a call."""

    def __init__(self, device: str) -> None:
        """Start with nothing seen."""
        self._device = device
        self._seen: dict[tuple[str, ...], _Tally] = {}
        self._thread = _Thread()
        self._hooks: list[RemovableHandle] = []
        self._open = 0

    def __reduce__(self) -> tuple[type[Recorder], tuple[str]]:
        """Let what holds a recorder be copied and pickled; a copy has seen nothing."""
        return Recorder, (self._device,)

    def start(self) -> None:
        """Begin to observe the operations and modules of this thread."""
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
        """Observe no more, as often as it was started."""
        thread = self._thread
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
            root = ddp.bare(module)
            thread.paths = {id(m): path for path, m in root.named_modules()}
        thread.modules.append(module)

    def _leave(self, module: nn.Module, _args: object, _output: object) -> None:
        # One that began before the recording was never entered.
        modules = self._thread.modules
        if modules and modules[-1] is module:
            modules.pop()

    def observe(
        self,
        name: str,
        frame: Frame,
        run: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation, and take down how it ran."""
        if not self._open:
            return run()  # computed again, in a backward pass
        thread = self._thread
        outer, thread.tally = thread.tally, _Tally(calls=1)
        cache = frame.cache
        before = (0, 0) if cache is None else (cache.misses, cache.bytes_cast)
        try:
            output = run()
            tally = thread.tally
        finally:
            thread.tally = outer
        if cache is not None:
            tally.casts += cache.misses - before[0]
            tally.bytes += cache.bytes_cast - before[1]
        dtypes = _dtypes(arguments)
        decision = decide(
            name,
            dtypes,
            self._device,
            policy=frame.policy,
            low=torch.get_autocast_dtype(self._device),
            module=frame.module,
            types=frame.types,
        )
        self._add(name, dtypes, output, decision.row, decision.reason, tally)
        return output

    def observe_unsteered(
        self, func: torch._ops.OpOverload, args: object, output: object
    ) -> None:
        """Take down an operation below autograd, unless it is part of a larger one."""
        dtypes, made = _dtypes(args), _dtypes(output)
        is_cast = func is _CAST and dtypes and made and dtypes != made
        size = _bytes(output) if is_cast else 0
        if self._thread.tally is not None:
            self._thread.tally.casts += bool(is_cast)
            self._thread.tally.bytes += size
            return
        views = any(out.alias_info for out in func._schema.returns)  # noqa: SLF001
        if views or not (dtypes and made):
            return
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        overload = func._overloadname  # noqa: SLF001
        if overload != "default":
            name = f"{name}.{overload}"
        tally = _Tally(1, int(bool(is_cast)), size)
        reason = "a cast in the code" if is_cast else "it runs as it is called"
        self._add(name, dtypes, output, "no row", reason, tally)

    def _add(
        self,
        name: str,
        dtypes: list[torch.dtype],
        output: object,
        row: str,
        reason: str,
        tally: _Tally,
    ) -> None:
        made = _words(_dtypes(output))
        key = (name, self._module(), _words(dtypes), made, row, reason)
        total = self._seen.setdefault(key, _Tally())
        total.calls += tally.calls
        total.casts += tally.casts
        total.bytes += tally.bytes

    def _module(self) -> str:
        thread = self._thread
        if not thread.modules:
            return ""
        inner = thread.modules[-1]
        return thread.paths.get(id(inner), type(inner).__name__)

    @property
    def seen(self) -> bool:
        """Something was observed."""
        return bool(self._seen)

    def table(self) -> Table:
        """Return what was observed, in the order in which it first ran."""
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (*key, tally.calls, tally.casts, tally.bytes)
            for key, tally in self._seen.items()
        )
        total = sum(tally.bytes for tally in self._seen.values())
        casts = sum(tally.casts for tally in self._seen.values())
        notes = (f"{casts} casts in all, which wrote {total:,} bytes",)
        return Table("What ran how", _COLUMNS, rows, notes)


class _Mode(DispatchMode):  # type: ignore[no-untyped-call]
    """Hands each operation of a thread to a recorder."""

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
        self._recorder.observe_unsteered(func, (args, kwargs), output)
        return output


def _tensors(value: object) -> list[Tensor]:
    leaves = _pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _dtypes(value: object) -> list[torch.dtype]:
    return [tensor.dtype for tensor in _tensors(value)]


def _bytes(value: object) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))


def _words(dtypes: list[torch.dtype]) -> str:
    """Return formats in words, each once."""
    return ", ".join(dict.fromkeys(map(formats.word, dtypes)))

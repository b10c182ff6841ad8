"""Keeps a stack of cast contexts for each thread and device.

`dispatch_kernels` reads the active `CastContext` from it.

The kernels are registered at a dispatch key that no tensor has. A thread reaches them
only between `push` and `pop`, which include that key in the thread's own dispatcher
state; plain `torch.autocast`, in the same thread or in others, never does.

Inside a backward pass, a context is active only if it was pushed in that same pass:
recomputed code gets the context of its forward pass from `recompute`, and the context
around `backward()` has no effect.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C import DispatchKey
from torch.library import Library, fallthrough_kernel

from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfstep.policy.rules import Policy

KEY = DispatchKey.__members__["AutocastPrivateUse1"]
"""Precedes the autocast keys of all devices, so that a policy casts before torch does;
`torch._C._DisableAutocast` and the compiler exclude it together with them."""
NO_BACKEND = "privateuseone"
"""torch's name for the backend of that key while none is registered."""

num_planned = 0
"""Modules that `graph.rewrite` has made in this process: they cast without a context.
Sessions read it before they warn that no context was opened."""


class Observer(Protocol):
    """Records how operations run; `recorder.Recorder` implements it."""

    def observe(
        self,
        name: str,
        context: CastContext,
        run: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation and return its result."""


@dataclass(frozen=True, slots=True)
class OpCast:
    """How one operation is cast in a context."""

    category: str
    rule_index: int | None
    """Index of the policy's rule that decided; None: the op table decided."""
    is_torch_default: bool
    """Whether torch's own autocast kernel does the same."""


@dataclass(eq=False, slots=True)
class CastContext:
    """The settings of one autocast context that the dispatch kernels read."""

    policy: Policy
    op_casts: Mapping[str, OpCast]
    """Operation -> its cast. Operations without an entry run as torch's table says."""
    cache: CastCache | None
    matched_rules: set[int]
    """Indices of the policy's rules that have applied so far."""
    recorder: Observer | None = None
    module: str = ""
    """Path of the module whose rule created this context; "" if none did."""
    types: tuple[str, ...] = ()
    """Class names of that module and of the enclosing ones."""
    outer: CastContext | None = None
    """The enclosing context, if a module rule created this one."""
    closed: bool = field(default=False, init=False)
    """The context has ended, and its cache is empty."""
    abandoned: list[tuple[int, Callable[[], object]]] = field(
        default_factory=list, init=False
    )
    """(thread id, function that undoes a module rule's pre-hook). Entries left when the
    context closes belong to modules whose forward hook an exception skipped."""

    def close(self) -> None:
        """Mark the context as ended and clear its cache."""
        self.closed = True
        self.recorder = None
        if self.cache is not None:
            self.cache.clear()

    @property
    def root(self) -> CastContext:
        """The outermost context of a chain made by module rules."""
        context = self
        while context.outer is not None:
            context = context.outer
        return context

    def for_recomputation(self) -> CastContext:
        """Return the context under which a part of the forward pass is recomputed.

        If the context has ended, the part gets a new cache, so that a weight that it
        uses twice is cast once, as in the forward pass.
        """
        if not self.root.closed:
            return self
        cache = None if self.cache is None else CastCache()
        return dataclasses.replace(self, cache=cache, recorder=None, outer=None)


@dataclass(eq=False, slots=True)
class _Entry:
    """A context pushed in one thread, on one device."""

    context: CastContext | None
    graph_task: int
    """Id of the backward pass that was running when it was pushed; -1: none."""
    outer: _Entry | None
    popped: bool = False


_lock = threading.Lock()
_fallback: list[Library] = []
"""Registers a fallthrough at the key for operations without a kernel; at most one."""


def check_key() -> None:
    """Prepare the dispatch key for use.

    Raises:
        UserError: If an out-of-tree backend uses it.
    """
    backend = torch._C._get_privateuse1_backend_name()  # noqa: SLF001
    if backend != NO_BACKEND:
        message = (
            f"policies need a dispatch key that the backend {backend!r} uses: open "
            "autocast() without policy, cache and record, or do not load that backend."
        )
        raise UserError(message)
    with _lock:
        if not _fallback:
            library = Library("_", "IMPL")  # type: ignore[no-untyped-call]
            library.fallback(fallthrough_kernel, KEY.name)  # type: ignore[no-untyped-call]
            _fallback.append(library)


class _ThreadState:
    """The contexts of one thread."""

    def __init__(self) -> None:
        self.innermost: dict[str, _Entry | None] = {}
        """Device type -> the innermost context."""
        self.pending_undo: list[Callable[[], object]] = []
        """Calls that this thread must make, because another closed its context."""
        self.on_popped: list[Callable[[], object]] = []
        """Calls to make after those, or when the thread ends."""

    def __del__(self) -> None:
        while self.on_popped:
            self.on_popped.pop(0)()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread = _Thread()


class Pushed(NamedTuple):
    """Return value of `push`, argument of `pop`."""

    device: str
    entry: _Entry
    state: _ThreadState
    """State of the thread that pushed: `pop` may run in another thread."""


def push(device: str, context: CastContext | None) -> Pushed:
    """Make a context the active one of this thread; None: no policy.

    Raises:
        UserError: If an out-of-tree backend uses the dispatch key.
    """
    if context is not None:
        check_key()
    state = _thread.state
    run_pending()
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    entry = _Entry(context, graph_task, state.innermost.get(device))
    state.innermost[device] = entry
    if context is not None and context.cache is not None:
        context.cache.open()
    _update_dispatch_key()
    return Pushed(device, entry, state)


def pop(
    pushed: Pushed, *undo: Callable[[], object], on_popped: Callable[[], object]
) -> None:
    """Remove a pushed context; contexts may be popped in any order, by any thread.

    Args:
        pushed: Return value of `push`.
        undo: Called in the thread that pushed: now, or on its next call of this module
            if this is another thread.
        on_popped: Called once after that, or when that thread has ended.
    """
    device, entry, state = pushed
    entry.popped = True
    remaining = state.innermost.get(device)
    while remaining is not None and remaining.popped:
        remaining = remaining.outer
    state.innermost[device] = remaining
    cache, remaining_cache = _cache_of(entry), _cache_of(remaining)
    if cache is not None and remaining_cache is not cache:
        cache.close()
    state.pending_undo += undo
    state.on_popped.append(on_popped)
    if state is _thread.state:
        run_pending()


def _cache_of(entry: _Entry | None) -> CastCache | None:
    return None if entry is None or entry.context is None else entry.context.cache


def run_pending() -> None:
    """Make the calls that other threads have left to this one."""
    state = _thread.state
    if not state.on_popped:
        return
    while state.pending_undo:
        state.pending_undo.pop(0)()
    _update_dispatch_key()
    while state.on_popped:
        state.on_popped.pop(0)()


def _update_dispatch_key() -> None:
    """Include the key in this thread's dispatcher state if it has a context."""
    included = is_open()
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not included)  # noqa: SLF001


def is_open() -> bool:
    """Return whether this thread has a context, active or not."""
    for entry in _thread.state.innermost.values():
        if entry is not None and entry.context is not None:
            return True
    return False


def active(device: str) -> CastContext | None:
    """Return the context that applies to operations of this thread now, or None."""
    entry = _thread.state.innermost.get(device)
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    return entry.context if entry and entry.graph_task == graph_task else None


def active_contexts() -> list[tuple[str, CastContext]]:
    """Return (device, active context) for each device on which a policy casts now."""
    state = _thread.state
    if state.on_popped:
        run_pending()
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    contexts = []
    for device, entry in state.innermost.items():
        if (
            entry is not None
            and entry.context is not None
            and entry.graph_task == graph_task
            and torch.is_autocast_enabled(device)
        ):
            contexts.append((device, entry.context))
    return contexts

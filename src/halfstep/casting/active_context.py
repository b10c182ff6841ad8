"""Which policy casts now: the contexts that a thread is in, by device.

In: a context that opens or closes. Out: the `CastContext` that
`dispatch_kernels` obeys.

The kernels stand at a dispatch key that no tensor has. A thread reaches them only
between `push` and `pop`, which switch that key in the thread's own dispatcher state;
plain `torch.autocast`, in the same thread or in others, never does.

Inside a backward pass a frame acts only where it was pushed in that same pass: what is
computed again gets the frame of its forward pass from `recompute`, and the context
around `backward()` has no say.
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
"""Above the autocast keys of all devices, so that a policy casts before torch does;
`torch._C._DisableAutocast` and the compiler switch it off with them."""
NO_BACKEND = "privateuseone"
"""What torch calls the backend of that key while there is none."""


class Observer(Protocol):
    """Takes down how operations run; `recorder.Recorder` is one."""

    def observe(
        self,
        name: str,
        context: CastContext,
        run: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation, and return what it returns."""


@dataclass(frozen=True, slots=True)
class OpCast:
    """How one operation runs under a frame."""

    category: str
    rule_index: int | None
    """Index of the policy's rule that decided; None: a row of a table."""
    is_torch_default: bool
    """torch's own kernel does just this."""


@dataclass(eq=False, slots=True)
class CastContext:
    """What a context decides, for the kernels that read it."""

    policy: Policy
    op_casts: Mapping[str, OpCast]
    """Operation -> how it runs. One without a row runs as torch's table says."""
    cache: CastCache | None
    matched_rules: set[int]
    """Indices of the policy's rules that have decided something so far."""
    recorder: Observer | None = None
    module: str = ""
    """Path of the module whose rule made this frame; "" where none did."""
    types: tuple[str, ...] = ()
    """Class names of that module and of those around it."""
    outer: CastContext | None = None
    """The frame around, where a module's rule made this one."""
    closed: bool = field(default=False, init=False)
    """The context is over, and its cache with it."""
    abandoned: list[tuple[int, Callable[[], object]]] = field(
        default_factory=list, init=False
    )
    """Thread, and how to leave what a rule on a module has entered there: what stands
    here when the context closes was left by an exception that no hook sees."""

    def close(self) -> None:
        """Take note that the context is over, which made the cache."""
        self.closed = True
        self.recorder = None
        if self.cache is not None:
            self.cache.clear()

    @property
    def root(self) -> CastContext:
        """The frame of the context itself."""
        context = self
        while context.outer is not None:
            context = context.outer
        return context

    def for_recomputation(self) -> CastContext:
        """Return the frame for a part of the forward pass that is computed again.

        Where the context is over, so is its cache: this part has one of its own, in
        which a weight that it uses twice is cast once, as it was.
        """
        if not self.root.closed:
            return self
        cache = None if self.cache is None else CastCache()
        return dataclasses.replace(self, cache=cache, recorder=None, outer=None)


@dataclass(eq=False, slots=True)
class _Entry:
    """A frame in force in one thread, on one device."""

    context: CastContext | None
    graph_task: int
    """The backward pass that was running when it was pushed; -1: none."""
    outer: _Entry | None
    popped: bool = False


_lock = threading.Lock()
_fallback: list[Library] = []
"""What lets all operations without a kernel at the key pass it, once there is one."""


def check_key() -> None:
    """Make the dispatch key ready for use.

    Raises:
        UserError: If a backend of its own uses it.
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
    """What one thread is in."""

    def __init__(self) -> None:
        self.innermost: dict[str, _Entry | None] = {}
        """Device type -> the innermost frame."""
        self.pending_undo: list[Callable[[], object]] = []
        """What another thread that has closed a context of this one leaves to it."""
        self.on_popped: list[Callable[[], object]] = []
        """What comes after that, or when the thread has ended."""

    def __del__(self) -> None:
        while self.on_popped:
            self.on_popped.pop(0)()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread = _Thread()


class Pushed(NamedTuple):
    """What `pop` needs."""

    device: str
    entry: _Entry
    state: _ThreadState
    """Of the thread that pushed: `pop` may run in another one."""


def push(device: str, context: CastContext | None) -> Pushed:
    """Put a frame in force in this thread; None: no policy.

    Raises:
        UserError: If a backend of its own uses the dispatch key.
    """
    if context is not None:
        check_key()
    state = _thread.state
    run_pending()
    entry = _Entry(context, _current_graph_task(), state.innermost.get(device))
    state.innermost[device] = entry
    if context is not None and context.cache is not None:
        context.cache.open()
    _update_dispatch_key()
    return Pushed(device, entry, state)


def pop(
    pushed: Pushed, *undo: Callable[[], object], on_popped: Callable[[], object]
) -> None:
    """End what a `push` began, in the thread of that, in any order.

    Args:
        pushed: What `push` has returned.
        undo: More that must be undone in that thread: at once, or when it next comes
            here, if this is another one.
        on_popped: Called once when that is done, or when that thread has ended.
    """
    device, entry, state = pushed
    entry.popped = True
    remaining = state.innermost.get(device)
    while remaining is not None and remaining.popped:
        remaining = remaining.outer
    state.innermost[device] = remaining
    cache = None if entry.context is None else entry.context.cache
    remaining_context = (
        None if remaining is None or remaining.context is None else remaining.context
    )
    if cache is not None and (
        remaining_context is None or remaining_context.cache is not cache
    ):
        cache.close()
    state.pending_undo += undo
    state.on_popped.append(on_popped)
    if state is _thread.state:
        run_pending()


def run_pending() -> None:
    """Undo what other threads have left to this one, if they have."""
    state = _thread.state
    if not state.on_popped:
        return
    while state.pending_undo:
        state.pending_undo.pop(0)()
    _update_dispatch_key()
    while state.on_popped:
        state.on_popped.pop(0)()


def _update_dispatch_key() -> None:
    """Let this thread's operations reach the kernels if a frame is in force in it."""
    included = is_open()
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not included)  # noqa: SLF001


def _current_graph_task() -> int:
    """Return the number of the backward pass that runs in this thread; -1: none."""
    number: int = torch._C._current_graph_task_id()  # noqa: SLF001
    return number


def is_open() -> bool:
    """Say whether any frame is in force in this thread, or was pushed in it."""
    return any(each and each.context for each in _thread.state.innermost.values())


def innermost_context(device: str) -> CastContext | None:
    """Return the frame that this thread pushed last."""
    entry = _thread.state.innermost.get(device)
    return None if entry is None else entry.context


def active(device: str) -> CastContext | None:
    """Return the frame that an operation in this thread runs under, if any."""
    entry = _thread.state.innermost.get(device)
    return (
        entry.context
        if entry is not None and entry.graph_task == _current_graph_task()
        else None
    )


def active_contexts() -> list[tuple[str, CastContext]]:
    """Return each device on which a policy casts now, and the frame in force."""
    state = _thread.state
    if state.on_popped:
        run_pending()
    graph_task = _current_graph_task()
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

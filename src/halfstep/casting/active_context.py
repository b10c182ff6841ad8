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
import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch._ops
from torch._C import DispatchKey
from torch.library import Library, fallthrough_kernel

from halfstep._torch.patches import AttributePatch, SharedPatches
from halfstep.casting import compile_guard
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C import DispatchKeySet

    from halfstep.policy.rules import Policy

    CompileState = tuple[int | None, Any]
    """Return value of `compile_guard.enter`."""

T = TypeVar("T")

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


def _without_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def key_extractor(tensors: Any, key_mask: DispatchKeySet) -> Any:  # noqa: ANN401
        return original(tensors, key_mask.remove(KEY))

    return key_extractor


# Higher-order operators require a kernel at each key that a thread includes.
patches = SharedPatches(AttributePatch(torch._ops, "key_extractor", _without_key))  # noqa: SLF001
"""Applied while any thread has a context; `recompute` adds its own."""


class _ThreadState:
    """The contexts of one thread."""

    def __init__(self) -> None:
        self.innermost: dict[str, Pushed | None] = {}
        """Device type -> the innermost context."""
        self.popped: list[tuple[CompileState, Callable[[], object] | None]] = []
        """What this thread must restore and call, since another popped its context."""

    def __del__(self) -> None:
        for _ in self.popped:
            patches.release()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread = _Thread()


@dataclass(eq=False, slots=True)
class Pushed:
    """A context pushed in one thread, on one device: returned by `push`."""

    context: CastContext | None
    cache: CastCache | None
    device: str
    state: _ThreadState
    """State of the thread that pushed: `pop` may run in another thread."""
    graph_task: int
    """Id of the backward pass that was running when it was pushed; -1: none."""
    outer: Pushed | None
    compile_state: CompileState
    is_popped: bool = False


def push(
    device: str, context: CastContext | None, guard: Policy | None = None
) -> Pushed:
    """Make a context the active one of this thread, and patch torch until `pop`.

    Args:
        device: Device type.
        context: None: no policy.
        guard: The policy for which torch.compile compiles. None: as before.

    Raises:
        UserError: If an out-of-tree backend uses the dispatch key.
    """
    if context is not None:
        check_key()
    state = _thread.state
    run_pending()
    cache = None if context is None else context.cache
    state.innermost[device] = pushed = Pushed(
        context,
        cache,
        device,
        state,
        torch._C._current_graph_task_id(),  # noqa: SLF001
        state.innermost.get(device),
        compile_guard.enter(guard, casts=context is not None),
    )
    if cache is not None:
        cache.open()
    _update_dispatch_key()
    patches.acquire()
    return pushed


def pop(pushed: Pushed, undo: Callable[[], object] | None = None) -> None:
    """Remove a pushed context; contexts may be popped in any order, by any thread.

    Args:
        pushed: Return value of `push`.
        undo: Called in the thread that pushed: now, or on its next call of this module
            if this is another thread. If that thread has ended, it is not called.
    """
    state = pushed.state
    pushed.is_popped = True
    remaining = state.innermost.get(pushed.device)
    while remaining is not None and remaining.is_popped:
        remaining = remaining.outer
    state.innermost[pushed.device] = remaining
    cache = pushed.cache
    if cache is not None and (remaining is None or remaining.cache is not cache):
        cache.close()
    state.popped.append((pushed.compile_state, undo))
    if state is _thread.state:
        run_pending()


def run_pending() -> None:
    """Restore this thread's state for contexts popped since, perhaps by others."""
    state = _thread.state
    if not state.popped:
        return
    is_open = _update_dispatch_key()
    while state.popped:
        (number, setting), undo = state.popped.pop(0)
        try:
            compile_guard.restore(number if is_open else 0, setting)
            if undo is not None:
                undo()
        finally:
            patches.release()


def _update_dispatch_key() -> bool:
    """Include the key in this thread's state if it has a context; return whether."""
    included = False
    for pushed in _thread.state.innermost.values():
        included |= pushed is not None and pushed.context is not None
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not included)  # noqa: SLF001
    return included


def active(device: str) -> CastContext | None:
    """Return the context that applies to operations of this thread now, or None."""
    pushed = _thread.state.innermost.get(device)
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    return pushed.context if pushed and pushed.graph_task == graph_task else None


def active_contexts() -> list[tuple[str, CastContext]]:
    """Return (device, active context) for each device on which a policy casts now."""
    state = _thread.state
    if state.popped:
        run_pending()
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    contexts = []
    for device, pushed in state.innermost.items():
        if (
            pushed is not None
            and pushed.context is not None
            and pushed.graph_task == graph_task
            and torch.is_autocast_enabled(device)
        ):
            contexts.append((device, pushed.context))
    return contexts


class PerThreadStack(Generic[T]):
    """A stack for each thread; a thread without entries pops from another thread's.

    Why: a generator with an open context may be finished, or garbage-collected, in
    another thread than it was started in.

    Copies (`copy.deepcopy`, `pickle`) are empty.
    """

    def __init__(self) -> None:
        # Keyed by the thread object: thread ids are reused after a thread ends.
        self._stacks: dict[threading.Thread, list[T]] = {}

    def __reduce__(self) -> tuple[type[PerThreadStack[T]], tuple[()]]:
        return PerThreadStack, ()

    def __bool__(self) -> bool:
        return any(list(self._stacks.values()))

    def push(self, entry: T) -> None:
        """Push an entry of this thread."""
        self._stacks.setdefault(threading.current_thread(), []).append(entry)

    def pop_own(self) -> T | None:
        """Pop the last entry of this thread; None if it has none."""
        return self._pop_of(threading.current_thread())

    def pop(self) -> T:
        """Pop the last entry of this thread, else of another, ended threads first.

        Raises:
            IndexError: If there is none.
        """
        current = threading.current_thread()
        others = sorted(self._stacks, key=threading.Thread.is_alive)
        for thread in (current, *others):
            entry = self._pop_of(thread)
            if entry is not None:
                return entry
        message = "a context was closed more often than it was opened"
        raise IndexError(message)

    def _pop_of(self, thread: threading.Thread) -> T | None:
        stack = self._stacks.get(thread)
        if stack is None:
            return None
        # Another thread may pop concurrently, so no earlier check is relied on.
        entry = stack.pop() if stack else None
        if not stack:
            self._stacks.pop(thread, None)
        return entry

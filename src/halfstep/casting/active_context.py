"""Which policy casts now: the contexts that a thread is in, by device.

In: a context that opens or closes. Out: the `Frame` that `dispatch_kernels` obeys.

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
        frame: Frame,
        run: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation, and return what it returns."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one operation runs under a frame."""

    category: str
    rule: int | None
    """Index of the policy's rule that decided; None: a row of a table."""
    stock: bool
    """torch's own kernel does just this."""


@dataclass(eq=False, slots=True)
class Frame:
    """What a context decides, for the kernels that read it."""

    policy: Policy
    plan: Mapping[str, Row]
    """Operation -> how it runs. One without a row runs as torch's table says."""
    cache: CastCache | None
    matched: set[int]
    """Indices of the policy's rules that have decided something so far."""
    recorder: Observer | None = None
    module: str = ""
    """Path of the module whose rule made this frame; "" where none did."""
    types: tuple[str, ...] = ()
    """Class names of that module and of those around it."""
    outer: Frame | None = None
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
    def root(self) -> Frame:
        """The frame of the context itself."""
        frame = self
        while frame.outer is not None:
            frame = frame.outer
        return frame

    def for_recomputation(self) -> Frame:
        """Return the frame for a part of the forward pass that is computed again.

        Where the context is over, so is its cache: this part has one of its own, in
        which a weight that it uses twice is cast once, as it was.
        """
        if not self.root.closed:
            return self
        cache = None if self.cache is None else CastCache()
        return dataclasses.replace(self, cache=cache, recorder=None, outer=None)


@dataclass(eq=False, slots=True)
class _Active:
    """A frame in force in one thread, on one device."""

    frame: Frame | None
    task: int
    """The backward pass that was running when it was pushed; -1: none."""
    below: _Active | None
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


class _Table:
    """What one thread is in."""

    def __init__(self) -> None:
        self.active: dict[str, _Active | None] = {}
        """Device type -> the innermost frame."""
        self.pending: list[Callable[[], object]] = []
        """What another thread that has closed a context of this one leaves to it."""
        self.settled: list[Callable[[], object]] = []
        """What comes after that, or when the thread has ended."""

    def __del__(self) -> None:
        while self.settled:
            self.settled.pop(0)()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.table = _Table()


_thread = _Thread()


class Pushed(NamedTuple):
    """What `pop` needs."""

    device: str
    active: _Active
    table: _Table
    """Of the thread that pushed: `pop` may run in another one."""


def push(device: str, frame: Frame | None) -> Pushed:
    """Put a frame in force in this thread; None: no policy.

    Raises:
        UserError: If a backend of its own uses the dispatch key.
    """
    if frame is not None:
        check_key()
    table = _thread.table
    settle()
    active = _Active(frame, _task(), table.active.get(device))
    table.active[device] = active
    if frame is not None and frame.cache is not None:
        frame.cache.begin()
    _set_key()
    return Pushed(device, active, table)


def pop(
    pushed: Pushed, *undo: Callable[[], object], settled: Callable[[], object]
) -> None:
    """End what a `push` began, in the thread of that, in any order.

    Args:
        pushed: What `push` has returned.
        undo: More that must be undone in that thread: at once, or when it next comes
            here, if this is another one.
        settled: Called once when that is done, or when that thread has ended.
    """
    device, active, table = pushed
    active.popped = True
    innermost = table.active.get(device)
    while innermost is not None and innermost.popped:
        innermost = innermost.below
    table.active[device] = innermost
    cache = None if active.frame is None else active.frame.cache
    still = None if innermost is None or innermost.frame is None else innermost.frame
    if cache is not None and (still is None or still.cache is not cache):
        cache.end()
    table.pending += undo
    table.settled.append(settled)
    if table is _thread.table:
        settle()


def settle() -> None:
    """Undo what other threads have left to this one, if they have."""
    table = _thread.table
    if not table.settled:
        return
    while table.pending:
        table.pending.pop(0)()
    _set_key()
    while table.settled:
        table.settled.pop(0)()


def _set_key() -> None:
    """Let this thread's operations reach the kernels if a frame is in force in it."""
    included = is_open()
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not included)  # noqa: SLF001


def _task() -> int:
    """Return the number of the backward pass that runs in this thread; -1: none."""
    number: int = torch._C._current_graph_task_id()  # noqa: SLF001
    return number


def is_open() -> bool:
    """Say whether any frame is in force in this thread, or was pushed in it."""
    return any(each and each.frame for each in _thread.table.active.values())


def current(device: str) -> Frame | None:
    """Return the frame that this thread pushed last."""
    active = _thread.table.active.get(device)
    return None if active is None else active.frame


def in_force(device: str) -> Frame | None:
    """Return the frame that an operation in this thread runs under, if any."""
    active = _thread.table.active.get(device)
    return active.frame if active is not None and active.task == _task() else None


def casting() -> list[tuple[str, Frame]]:
    """Return each device on which a policy casts now, and the frame in force."""
    table = _thread.table
    if table.settled:
        settle()
    task = _task()
    frames = []
    for device, active in table.active.items():
        if (
            active is not None
            and active.frame is not None
            and active.task == task
            and torch.is_autocast_enabled(device)
        ):
            frames.append((device, active.frame))
    return frames

"""Who steers casting now: the regions that a thread is in, and those it was in.

In: a region that opens or closes. Out: the `Frame` in force for a device, in the
forward pass, and in the backward pass when it computes a part of the forward again.

Regions close before the backward pass, and activation checkpointing then restores what
torch knows of a region, which is no policy. But each node of the autograd graph bears
the number under which it was made, and regions note between which numbers they were
open: so the node that is running tells which policy its forward pass ran under.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from halfstep import saved_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from halfstep.cast_cache import CastCache
    from halfstep.policy import Policy

_KEPT = 4096
"""Openings and closings that a thread remembers: those of a few thousand steps."""
_THREADS = 64
"""Threads that are remembered."""


class Observer(Protocol):
    """Takes down how operations run; `record.Recorder` is one."""

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
    """What a region steers, for the kernels that read it."""

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
    """Only a recomputation still asks for it: the cache is no longer its own."""
    hooks: int = field(default=0, init=False)
    """Which hooks on saved tensors, as checkpointing sets, it came into force under."""
    within: int | None = field(default=None, init=False)
    """Number of the autograd node that was running when it came into force."""


class _Log:
    """Which frame was in force from which autograd number on, in one thread."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.frames: list[Frame | None] = []
        self.forgotten = 0
        """Of numbers below this one nothing is known."""

    def note(self, frame: Frame | None) -> None:
        number = _next_number()
        while self.numbers and self.numbers[-1] > number:
            # Numbers may begin anew: those to come have the later meaning.
            self.numbers.pop()
            self.frames.pop()
        if self.numbers and self.numbers[-1] == number:
            self.frames[-1] = frame
            return
        self.numbers.append(number)
        self.frames.append(frame)
        if len(self.numbers) > 2 * _KEPT:
            del self.numbers[:_KEPT], self.frames[:_KEPT]
            self.forgotten = self.numbers[0]

    def at(self, number: int) -> Frame | None:
        index = bisect_right(self.numbers, number) - 1
        return self.frames[index] if index >= 0 else None


class _Thread(threading.local):
    """The frames of one thread, by device type."""

    def __init__(self) -> None:
        self.frames: dict[str, Frame | None] = {}
        self.logs: dict[str, _Log] = {}
        self.again: dict[str, tuple[int, Frame | None]] = {}
        """What a backward pass, named by its task, computes again."""


_thread = _Thread()
_past: dict[str, list[_Log]] = {}
"""The logs of all threads, the one in use last at the end: a backward pass may run in
another thread than its forward."""
_lock = threading.Lock()


def _next_number() -> int:
    """Return the number that the next autograd node of this thread will bear."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined] # noqa: SLF001
    return number


def _node_number() -> int | None:
    """Return the number of the autograd node that is running, if one is."""
    node = torch._C._current_autograd_node()  # noqa: SLF001
    return None if node is None else node._sequence_nr()  # noqa: SLF001


def enter(device: str, frame: Frame | None) -> Frame | None:
    """Put a frame in force in this thread; return the one before, for `leave`."""
    before = _thread.frames.get(device)
    _thread.frames[device] = frame
    within = _node_number()
    if within is None:
        # What an error in a backward pass has left behind.
        _thread.again.clear()
    if frame is not None:
        frame.within = within
        frame.hooks = saved_hooks.hooks()
        if frame.cache is not None:
            frame.cache.begin()
    log = _thread.logs.get(device)
    if log is None:
        # A thread that only works for the backward pass makes no numbers of its own.
        if frame is None or within is not None:
            return before
        log = _thread.logs[device] = _Log()
    logs = _past.setdefault(device, [])
    if not logs or logs[-1] is not log:
        with _lock:
            # A thread for each replica and step would be remembered without end.
            kept = [other for other in logs if other is not log][-_THREADS + 1 :]
            logs[:] = [*kept, log]
    log.note(frame)
    return before


def leave(device: str, before: Frame | None) -> None:
    """Put the frame in force that was so before."""
    left = _thread.frames.get(device)
    _thread.frames[device] = before
    cache = None if left is None else left.cache
    if cache is not None and (before is None or before.cache is not cache):
        cache.end()
    log = _thread.logs.get(device)
    if log is not None:
        log.note(before)


def current(device: str) -> Frame | None:
    """Return the frame of the innermost region that this thread is in."""
    return _thread.frames.get(device)


def in_force(device: str) -> Frame | None:
    """Return the frame that an operation runs under, recomputation included.

    In a backward pass it is that of the forward pass, whatever region is around it,
    unless the recomputation itself has opened one.

    Raises:
        RuntimeError: If a backward pass recomputes, and threads with different
            policies could each have run its forward pass, or it was too long ago.
    """
    frame = _thread.frames.get(device)
    if device not in _past:
        return frame
    number = _node_number()
    if number is None or (frame is not None and frame.within == number):
        return frame
    return _of(number, device)


def _of(number: int, device: str) -> Frame | None:
    """Return the frame under which the autograd node of a number was made."""
    log = _thread.logs.get(device)
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    outer, again = _thread.again.get(device, (task, None))
    if outer != task and not _is_nested():
        # A backward pass that ended in an error has left it.
        outer, again = task, None
    found = log.at(number) if log is not None else None
    if outer != task and (found is None or found.within is None):
        # A backward pass inside a node of another one, of what that computes again.
        return again
    found = found or _elsewhere(number, device)
    # Checkpointing that began outside a module computes again from there.
    while found is not None and found.outer and found.hooks != found.outer.hooks:
        found = found.outer
    if found is None:
        logs = _past[device] if _is_worker() else filter(None, [log])
        if any(number < log.forgotten for log in logs):
            message = (
                "a recomputation in backward belongs to a forward pass thousands of "
                "regions ago, whose policy is forgotten; run the backward pass sooner."
            )
            raise RuntimeError(message)
        return None
    if found is not again:
        _thread.again[device] = task, found
        at_the_end = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        at_the_end(_thread.again.clear)
        if found.cache is not None and not found.cache.open:
            found.cache.begin()
            at_the_end(found.cache.end)
    region = found
    while region.outer is not None:
        region = region.outer
    found.closed = region.closed
    return found


def _is_worker() -> bool:
    """Say whether autograd has started this thread."""
    return isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001


def _is_nested() -> bool:
    """Say whether this backward pass runs inside a node of another one."""
    depth = int(_is_worker())
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return depth > 1


def _elsewhere(number: int, device: str) -> Frame | None:
    """Return the frame that a thread was in at a number, if all such threads agree.

    A number that this thread has given to a node itself is taken for its own; threads
    that autograd starts have none.
    """
    if not _is_worker() and number < _next_number():
        return None
    with _lock:
        logs = list(_past[device])
    found = [frame for log in logs if (frame := log.at(number)) is not None]
    if any(frame.plan != found[0].plan for frame in found):
        words = ", ".join(sorted({str(frame.policy) for frame in found}))
        message = (
            "a recomputation in backward may belong to regions of several threads, "
            f"with policies {words}; run their backward passes in their threads."
        )
        raise RuntimeError(message)
    return found[0] if found else None

"""Who steers casting now: the regions that a thread is in, and those it was in.

In: a region that opens or closes. Out: the `Frame` in force for a device, in the
forward pass, and in the backward pass when it computes a part of the forward again.

Regions close before the backward pass, and activation checkpointing then restores what
torch knows of a region, which is no policy. But each node of the autograd graph bears
the number under which it was made, and regions note between which numbers they were
open: so the node that is running tells which policy its forward pass ran under.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfstep.cast_cache import CastCache
    from halfstep.policy import Policy

_KEPT = 4096
"""Openings and closings that a thread remembers: those of a few thousand steps."""


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
    closed: bool = field(default=False, init=False)
    """Only a recomputation still asks for it: the cache is no longer its own."""


class _Log:
    """Which frame was in force from which autograd number on, in one thread."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.frames: list[Frame | None] = []

    def note(self, frame: Frame | None) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined] # noqa: SLF001
        if self.numbers and self.numbers[-1] == number:
            self.frames[-1] = frame
            return
        self.numbers.append(number)
        self.frames.append(frame)
        if len(self.numbers) > 2 * _KEPT:
            del self.numbers[:_KEPT], self.frames[:_KEPT]

    def at(self, number: int) -> Frame | None:
        index = bisect_right(self.numbers, number) - 1
        return self.frames[index] if index >= 0 else None


class _Thread(threading.local):
    """The frames of one thread, by device type."""

    def __init__(self) -> None:
        self.frames: dict[str, Frame | None] = {}
        self.logs: dict[str, _Log] = {}


_thread = _Thread()
_past: dict[str, list[_Log]] = {}
"""The logs of all threads: a backward pass may run in another than its forward."""
_lock = threading.Lock()


def enter(device: str, frame: Frame | None) -> Frame | None:
    """Put a frame in force in this thread; return the one before, for `leave`."""
    before = _thread.frames.get(device)
    _thread.frames[device] = frame
    log = _thread.logs.get(device)
    if log is None:
        if frame is None:
            return before
        log = _thread.logs[device] = _Log()
        with _lock:
            logs = _past.setdefault(device, [])
            logs.append(log)
            # A thread for each replica and step would be remembered without end.
            del logs[: -_KEPT // 64]
    log.note(frame)
    return before


def leave(device: str, before: Frame | None) -> None:
    """Put the frame in force that was so before."""
    _thread.frames[device] = before
    log = _thread.logs.get(device)
    if log is not None:
        log.note(before)


def current(device: str) -> Frame | None:
    """Return the frame of the innermost region that this thread is in."""
    return _thread.frames.get(device)


def in_force(device: str) -> Frame | None:
    """Return the frame that an operation runs under, recomputation included.

    Raises:
        RuntimeError: If a backward pass recomputes, and threads with different
            policies could each have run its forward pass.
    """
    frame = _thread.frames.get(device)
    if frame is None and device in _past:
        node = torch._C._current_autograd_node()  # noqa: SLF001
        if node is not None:
            return _of(node._sequence_nr(), device)  # noqa: SLF001
    return frame


def _of(number: int, device: str) -> Frame | None:
    own = _thread.logs.get(device)
    found = own.at(number) if own else None
    if found is not None:
        return found
    with _lock:
        frames = [log.at(number) for log in _past[device]]
    candidates = {id(frame.policy): frame for frame in frames if frame is not None}
    if len({frame.policy for frame in candidates.values()}) > 1:
        words = ", ".join(sorted(str(f.policy) for f in candidates.values()))
        message = (
            "a recomputation in backward may belong to regions of several threads, "
            f"with policies {words}; run their backward passes in their threads."
        )
        raise RuntimeError(message)
    return next(iter(candidates.values()), None)

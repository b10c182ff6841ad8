"""Stops a run after the current step on SIGTERM and SIGINT; errors that end runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from halfstep.reporting.argument_parser import print_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from halfstep.nonfinite.origin import BadOp

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 25.0
"""Seconds in which a rank must react to a signal; torchrun kills its own after 30."""
_REPEAT_SECONDS = 1.0
_EXIT_STATUS_BASE = 128  # what shells add to the signal number in the exit status


class Diverged(RuntimeError):  # noqa: N818 -- an outcome, as LossScaleCollapse is
    """Training has diverged: the model's loss is non-finite."""

    def __init__(self, message: str, bad_op: BadOp | None = None) -> None:
        more = "" if bad_op is None else f" The last batch, run again: {bad_op}"
        super().__init__(message + more)
        self.bad_op = bad_op


class Stopped(Exception):  # noqa: N818 -- likewise
    """A run stopped by a signal, after saving a checkpoint."""

    def __init__(self, number: int, step: int, total: int, out: object) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step} of {total}; the checkpoint is "
            f"saved: go on with --resume --out {shlex.quote(str(out))}"
        )
        self.status = _EXIT_STATUS_BASE + number
        """The exit status: 128 + signal number, so 130 or 143."""


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the first signal; 0 if none."""
        self._requested_at = 0.0

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal; a second one gets its default handling.

        A scheduler may signal a launcher and its processes, and the launcher forwards
        it: a repeat within `_REPEAT_SECONDS` is the same request.
        """
        del frame
        now = time.monotonic()
        if self.signal and now - self._requested_at < _REPEAT_SECONDS:
            return
        self._requested_at = self._requested_at or now
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, processes: int = 1) -> Iterator[None]:
    """Handle signals as a request to stop, until the context ends.

    One of several processes ends if it cannot react within `GRACE_SECONDS`.

    Python can set handlers in the main thread only; elsewhere this does nothing. It
    leaves signals alone that are ignored, as shells do for background jobs, or handled
    outside Python, because such handlers could not be restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    previous = {n: h for n, h in handlers.items() if h not in {signal.SIG_IGN, None}}
    try:
        for number in previous:
            signal.signal(number, stop.request)
        with _end_if_blocked(stop) if processes > 1 else contextlib.nullcontext():
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _end_if_blocked(stop: StopRequest) -> Iterator[None]:
    """End the process if no handler runs within `GRACE_SECONDS` of a signal.

    Handlers run in the main thread, between instructions of Python. A collective that
    waits for a process which is stuck does not return to them; a thread can still act.
    """
    reader, writer = socket.socketpair()
    writer.settimeout(0)  # `set_wakeup_fd` demands that it does not block
    is_over = threading.Event()

    def watch() -> None:
        while (received := reader.recv(1)) and received[0] not in SIGNALS:
            pass
        if not received or is_over.wait(GRACE_SECONDS) or stop.signal:
            return
        name = signal.Signals(received[0]).name
        message = (
            f"ended by {name}: this process waits for another that does not answer; "
            "go on from the last checkpoint with --resume"
        )
        os._exit(print_error(message, _EXIT_STATUS_BASE + received[0]))

    thread = threading.Thread(target=watch, daemon=True)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        is_over.set()
        writer.shutdown(socket.SHUT_RDWR)  # workers that were forked hold it, too
        thread.join()
        reader.close()
        writer.close()

"""Ends before the end: a signal stops after the step under way, and saves before."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from halfstep.nonfinite.origin import BadOp

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REPEAT_SECONDS = 1.0  # seconds
_EXIT_STATUS_BASE = (
    128  # what a shell adds to the number of the signal that ended a program
)


class Diverged(RuntimeError):  # noqa: N818 -- an outcome, as LossScaleCollapse is
    """The weights give a loss that is not a number."""

    def __init__(self, message: str, bad_op: BadOp | None = None) -> None:
        more = "" if bad_op is None else f" The last batch, run again: {bad_op}"
        super().__init__(message + more)
        self.bad_op = bad_op


class Stopped(Exception):  # noqa: N818 -- likewise
    """A run that was asked to stop, and saved before it did."""

    def __init__(self, number: int, step: int, total: int, out: object) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step} of {total}; the checkpoint is "
            f"saved: go on with --resume --out {out}"
        )
        self.status = _EXIT_STATUS_BASE + number
        """The exit status: 128 and the signal's number, 130 or 143."""


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal = 0
        """The number of the first signal; 0 for none yet."""
        self._requested_at = 0.0

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Remember a signal; a second one ends the program as it always did.

        A scheduler may signal a launcher and its processes, and the launcher pass it
        on: what comes within a second is the same wish.
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
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Take signals as a request to stop, until the context ends.

    In a thread that is not the main one, signals cannot be taken: they do what they
    did before. So do those that are ignored, as a shell's background has it, and those
    that are handled outside Python, for these handlers could not be put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    previous = {n: h for n, h in handlers.items() if h not in {signal.SIG_IGN, None}}
    try:
        for number in previous:
            signal.signal(number, stop.request)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

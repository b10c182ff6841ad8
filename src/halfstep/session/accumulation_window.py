"""The accumulation window: how many micro-batches of a step have come.

In: how many make up a step. Out: the count, and what is reported of a window that is
left unfinished.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from halfstep.errors import warn_caller

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)


class Window:
    """Micro-batches since the last optimizer step.

    Attributes:
        size: Micro-batches of a step.
        done: Those that `session.step` has counted.
        loss: Of the micro-batch under way; None between micro-batches.
        regions: Opened for training since the last call of `session.step`.
        passes: Of losses without a name since then.
        failed: A backward pass ended with an exception, amid gradients of others.
        held: The last one left gradients where the caller can clear them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.done = 0
        self.loss: Tensor | None = None
        self.regions = self.passes = 0
        self.held = self.failed = False
        self._warned = self._told_cleared = self._told_rare = False

    @property
    def pending(self) -> int:
        """Micro-batches whose gradients no step has used yet."""
        return self.done + (self.loss is not None)

    @property
    def share(self) -> float:
        """What brings the sum of a window to the mean of its micro-batches."""
        # A step that failed leaves its window full.
        return self.size / min(self.done, self.size)

    def end(self) -> None:
        """Begin the next window."""
        self.done, self.loss, self.held = 0, None, False
        self.regions = self.passes = 0
        self.failed = False

    def going_on(self, *, held: bool) -> None:
        """Warn once if gradients of the window are gone before its next pass.

        Args:
            held: Some are still there.
        """
        if self.held and not held and not self._told_cleared:
            self._told_cleared = True
            warn_caller(
                f"gradients of {self.done} of {self.size} micro-batches were cleared "
                "before the step that needs them: leave optimizer.zero_grad() out; "
                "session.step() clears them after each full window."
            )

    def counted(self) -> None:
        """Warn once if `session.step` is called for whole windows, not micro-batches.

        Several losses of one micro-batch come from one region; two regions for two
        losses are no rarity.
        """
        rare = self.size > 2 and self.passes == self.regions == self.size  # noqa: PLR2004
        self.regions = self.passes = 0
        if rare and not self._told_rare:
            self._told_rare = True
            warn_caller(
                f"session.step() was called after {self.size} backward passes, which "
                f"with accumulate={self.size} it counts as one micro-batch of "
                f"{self.size}: call it after each backward pass."
            )

    def evaluating(self) -> None:
        """Warn once that weights lack micro-batches that have been run."""
        if self.done and not self._warned:
            self._warned = True
            warn_caller(
                f"evaluation with {self.done} of {self.size} micro-batches pending: "
                "the weights lack them. session.flush() updates with those there are."
            )

    def watch(self, session: object) -> None:
        """Log what is pending when a session is gone, or Python ends."""
        weakref.finalize(session, _gone, self)


def _gone(window: Window) -> None:
    if window.done:
        _logger.warning(
            "the session ended with %d of %d micro-batches pending: no step used their "
            "gradients. session.flush() updates with those there are.",
            window.done,
            window.size,
        )

"""Counts the micro-batches of an optimizer step, and warns about unfinished windows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from halfstep.errors import warn_caller

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)


class AccumulationWindow:
    """Micro-batches since the last optimizer step.

    Attributes:
        size: Micro-batches per step.
        num_done: Micro-batches that `session.step` has counted.
        loss: Loss of the current micro-batch; None between micro-batches.
        num_contexts: Training contexts opened since the last call of `session.step`.
        num_passes: Backward passes of unnamed losses since then.
        has_failed: A backward pass raised after others had left gradients, or a step
            that had begun to change them raised.
        has_gradients: The last micro-batch left gradients that the caller can clear.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_done = 0
        self.loss: Tensor | None = None
        self.num_contexts = self.num_passes = 0
        self.has_gradients = self.has_failed = False
        self._warned_pending = self._warned_cleared = self._warned_rare = False

    @property
    def num_pending(self) -> int:
        """Number of micro-batches whose gradients no step has used yet."""
        return self.num_done + (self.loss is not None)

    @property
    def has_begun(self) -> bool:
        """Whether any part of the window has been computed."""
        return bool(self.num_contexts or self.num_pending)

    def reset(self) -> None:
        """Start the next window."""
        self.num_done, self.loss, self.has_gradients = 0, None, False
        self.num_contexts = self.num_passes = 0
        self.has_failed = False

    def warn_if_cleared(self, *, has_gradients: bool) -> None:
        """Warn once if gradients of the window are gone before its next pass.

        Args:
            has_gradients: Whether some still exist.
        """
        if self.has_gradients and not has_gradients and not self._warned_cleared:
            self._warned_cleared = True
            warn_caller(
                f"gradients of {self.num_done} of {self.size} micro-batches "
                "were cleared "
                "before the step that needs them: leave optimizer.zero_grad() out; "
                "session.step() clears them after each full window."
            )

    def warn_if_too_rare(self) -> None:
        """Warn once if `session.step` is called per window, not per micro-batch.

        Several losses of one micro-batch normally share a context; but two contexts for
        two losses are common, so windows of 2 do not warn.
        """
        is_too_rare = (
            self.size > 2  # noqa: PLR2004
            and self.num_passes == self.num_contexts == self.size
        )
        self.num_contexts = self.num_passes = 0
        if is_too_rare and not self._warned_rare:
            self._warned_rare = True
            warn_caller(
                f"session.step() was called after {self.size} backward passes, which "
                f"with accumulate={self.size} it counts as one micro-batch of "
                f"{self.size}: call it after each backward pass."
            )

    def warn_of_changed_gradients(self) -> None:
        """Warn that gradients were changed after a backward pass.

        Clipping by hand compares the norms of scaled gradients. Multiplying them, as an
        average over ranks does, is correct at any scale but cannot be told apart.
        """
        warn_caller(
            "gradients were changed between session.backward() and session.step(), "
            "where they are multiplied by the loss scale: to clip them, call "
            "halfstep.prepare(..., clip_grad_norm=...) instead."
        )

    def warn_if_pending(self) -> None:
        """Warn once that the weights do not include the pending micro-batches."""
        if self.num_done and not self._warned_pending:
            self._warned_pending = True
            warn_caller(
                f"evaluation with {self.num_done} of {self.size} "
                "micro-batches pending: "
                "the weights lack them. session.flush() updates with those there are."
            )

    def log_pending(self) -> None:
        """Log pending micro-batches, when the session is collected or Python exits."""
        if self.num_done:
            _logger.warning(
                "the session ended with %d of %d micro-batches pending: no step used "
                "their gradients. session.flush() updates with those there are.",
                self.num_done,
                self.size,
            )

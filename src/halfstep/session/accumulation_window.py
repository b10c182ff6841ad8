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


class AccumulationWindow:
    """Micro-batches since the last optimizer step.

    Attributes:
        size: Micro-batches of a step.
        num_done: Those that `session.step` has counted.
        loss: Of the micro-batch under way; None between micro-batches.
        num_contexts: Opened for training since the last call of `session.step`.
        num_passes: Of losses without a name since then.
        has_failed: A backward pass ended with an exception, amid gradients of others.
        has_gradients: The last one left gradients where the caller can clear them.
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
        """Micro-batches whose gradients no step has used yet."""
        return self.num_done + (self.loss is not None)

    @property
    def has_begun(self) -> bool:
        """Whether anything of it has been computed."""
        return bool(self.num_contexts or self.num_pending)

    def reset(self) -> None:
        """Begin the next window."""
        self.num_done, self.loss, self.has_gradients = 0, None, False
        self.num_contexts = self.num_passes = 0
        self.has_failed = False

    def warn_if_cleared(self, *, has_gradients: bool) -> None:
        """Warn once if gradients of the window are gone before its next pass.

        Args:
            has_gradients: Some are still there.
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
        """Warn once if `session.step` is called for whole windows, not micro-batches.

        Several losses of one micro-batch come from one context; two contexts for two
        losses are no rarity.
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
        """Warn that gradients are not as a backward pass left them.

        Clipping by hand compares the norms of scaled gradients. Multiplying them, as an
        average over ranks does, is right at any scale, and looks alike.
        """
        warn_caller(
            "gradients were changed between session.backward() and session.step(), "
            "where they are multiplied by the loss scale: to clip them, call "
            "halfstep.prepare(..., clip_grad_norm=...) instead."
        )

    def warn_if_pending(self) -> None:
        """Warn once that weights lack micro-batches that have been run."""
        if self.num_done and not self._warned_pending:
            self._warned_pending = True
            warn_caller(
                f"evaluation with {self.num_done} of {self.size} "
                "micro-batches pending: "
                "the weights lack them. session.flush() updates with those there are."
            )

    def log_pending_at_end(self, session: object) -> None:
        """Log what is pending when a session is gone, or Python ends."""
        weakref.finalize(session, _log_pending, self)


def _log_pending(window: AccumulationWindow) -> None:
    if window.num_done:
        _logger.warning(
            "the session ended with %d of %d micro-batches pending: no step used their "
            "gradients. session.flush() updates with those there are.",
            window.num_done,
            window.size,
        )

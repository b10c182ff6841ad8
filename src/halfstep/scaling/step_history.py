"""Losses, scales and overflows of past steps, to explain a loss scale collapse.

In: loss, scale and overflow of each step. Out: plain values, which a state carries into
the run that goes on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from halfstep.errors import UserError, require, require_type

EARLY_STEPS = 20
"""Applied steps up to which overflow in a forward pass that used to work is put down
to the learning rate: the batches are like the first ones, the weights are not."""


@dataclass
class LossHistory:
    """What the losses of the applied steps were."""

    first: float = math.nan
    last: float = math.nan
    applied: int = 0
    from_first_step: bool = True
    """Counted from the run's first step on; if not, it was more than `applied`."""

    @property
    def is_early(self) -> bool:
        """Whether the run has been at work for some steps only, as far as is known."""
        return self.from_first_step and 0 < self.applied <= EARLY_STEPS

    def add(self, loss: float) -> None:
        """Take in the loss of one applied step."""
        # One from the middle of a run is as likely to be half of the next as twice
        # that, and says nothing.
        if self.from_first_step and not self.applied:
            self.first = loss
        self.last = loss
        self.applied += 1

    def has_diverged(self, current: float) -> bool:
        """Say whether the loss has at least doubled since the first step.

        Args:
            current: Of the last step, which was skipped; inf and NaN count for nothing.
        """
        last = abs(current) if math.isfinite(current) else 0.0
        return max(abs(self.last), last) >= 2 * abs(self.first) > 0


@dataclass
class StepHistory:
    """What is remembered of the steps so far."""

    losses: LossHistory = field(default_factory=LossHistory)
    history: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Loss scales of the last steps in a row that overflowed."""
    in_a_row: int = 0
    """How many those were."""

    def add(
        self, scale: float, loss: float, *, skipped: bool, overflowed: bool
    ) -> None:
        """Take in one step.

        Args:
            scale: Of its backward pass.
            loss: Its loss; NaN if nobody showed it.
            skipped: Whether the step was.
            overflowed: Whether a pass did.
        """
        if not skipped:
            self.losses.add(loss)
        if overflowed:
            self.history.append(scale)
            self.in_a_row += 1
        else:
            self.history.clear()
            self.in_a_row = 0

    def data(self) -> dict[str, Any]:
        """Return plain values: what every rank knows, for a state is one for all.

        Each rank has losses of its own, so they are no part of it.
        """
        return {
            "applied": self.losses.applied,
            "begun": self.losses.from_first_step,
            "history": [*self.history],
            "in_a_row": self.in_a_row,
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StepHistory:
        """Return what `data` gave.

        Raises:
            UserError: If it is no dictionary, or a part is missing or of another kind.
        """
        require_type("'watch'", data, isinstance(data, dict), "a dict, as it was saved")
        for name in cls().data():
            if name not in data:
                message = (
                    f"loss-scale state's 'watch' has no {name!r}; it holds {[*data]}."
                )
                raise UserError(message)
        for name in ("applied", "in_a_row"):
            is_valid = type(data[name]) is int and data[name] >= 0
            require(f"watch[{name!r}]", data[name], is_valid, "a number of steps, >= 0")
        from_first_step, history = data["begun"], data["history"]
        is_valid = isinstance(from_first_step, bool)
        require("watch['begun']", from_first_step, is_valid, "True or False")
        is_valid = isinstance(history, list) and all(map(_is_scale, history))
        require("watch['history']", history, is_valid, "a list of finite numbers > 0")
        losses = LossHistory(applied=data["applied"], from_first_step=data["begun"])
        return cls(losses, deque(data["history"], maxlen=64), data["in_a_row"])


def _is_scale(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0

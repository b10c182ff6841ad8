"""What is remembered of the steps so far, to say why a run is lost.

In: loss, scale and overflow of each step. Out: plain values, which a state carries into
the run that goes on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from halfstep.errors import UserError, require, require_kind

YOUNG = 20
"""Applied steps up to which overflow in a forward pass that used to work is put down
to the learning rate: the batches are like the first ones, the weights are not."""


@dataclass
class Losses:
    """What the losses of the applied steps were."""

    first: float = math.nan
    last: float = math.nan
    applied: int = 0
    begun: bool = True
    """Counted from the run's first step on; if not, it was more than `applied`."""

    @property
    def few(self) -> bool:
        """Whether the run has been at work for some steps only, as far as is known."""
        return self.begun and 0 < self.applied <= YOUNG

    def add(self, loss: float) -> None:
        """Take in the loss of one applied step."""
        # One from the middle of a run is as likely to be half of the next as twice
        # that, and says nothing.
        if self.begun and not self.applied:
            self.first = loss
        self.last = loss
        self.applied += 1

    def ran_away(self, now: float) -> bool:
        """Say whether the loss has at least doubled since the first step.

        Args:
            now: Of the last step, which was skipped; inf and NaN count for nothing.
        """
        last = abs(now) if math.isfinite(now) else 0.0
        return max(abs(self.last), last) >= 2 * abs(self.first) > 0


@dataclass
class Past:
    """What is remembered of the steps so far."""

    losses: Losses = field(default_factory=Losses)
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
            "begun": self.losses.begun,
            "history": [*self.history],
            "in_a_row": self.in_a_row,
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Past:
        """Return what `data` gave.

        Raises:
            UserError: If it is no dictionary, or a part is missing or of another kind.
        """
        require_kind("'watch'", data, isinstance(data, dict), "a dict, as it was saved")
        for name in cls().data():
            if name not in data:
                message = (
                    f"loss-scale state's 'watch' has no {name!r}; it holds {[*data]}."
                )
                raise UserError(message)
        for name in ("applied", "in_a_row"):
            good = type(data[name]) is int and data[name] >= 0
            require(f"watch[{name!r}]", data[name], good, "a number of steps, >= 0")
        begun, history = data["begun"], data["history"]
        good = isinstance(begun, bool)
        require("watch['begun']", begun, good, "True or False")
        good = isinstance(history, list) and all(map(_is_scale, history))
        require("watch['history']", history, good, "a list of finite numbers > 0")
        losses = Losses(applied=data["applied"], begun=data["begun"])
        return cls(losses, deque(data["history"], maxlen=64), data["in_a_row"])


def _is_scale(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0

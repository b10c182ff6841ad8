"""A step of the training program that failed, run again to see why.

In: the records of steps, and the work of the failing one. Out: a `BadOp` for the
metrics and the error that ends the run.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.replay import first_bad, not_reproduced
from halfstep.distributed import process_group
from halfstep.scaling.step_history import Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from halfstep.nonfinite.origin import BadOp
    from halfstep.session.session import Session
    from halfstep.train.step_dataset import Work

SKIPS = 5
"""In a row, after which even a scale that still falls is looked into. From 2**16, a
usual start loses about two; five are a factor of 32."""

MOST = 10
"""Replays of a run: each takes as long as tens of steps, and the first ones tell."""


@dataclass
class Watcher:
    """Says when a step is worth running again."""

    losses: Losses = field(default_factory=Losses)
    """Of the steps applied."""
    in_a_row: int = 0
    """Steps skipped since the last one applied."""
    left: int = MOST

    def due(self, record: Mapping[str, Any], *, moves: bool) -> bool:
        """Take in the record of a step; say whether it should be run again.

        Once in a row of skips: at the first where no scale can mend it, since the loss
        is not finite or the scale is fixed; otherwise after `SKIPS`.

        Args:
            record: Of the step.
            moves: The loss scale falls when steps are skipped.
        """
        if not record["skipped"]:
            if math.isfinite(record["loss"]):
                self.losses.add(record["loss"])
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        hopeless = not (moves and math.isfinite(record["loss"]))
        due = self.in_a_row == (1 if hopeless else SKIPS) and self.left > 0
        self.left -= due
        return due

    def history(self, applied: int) -> Losses:
        """Return the losses of a run that has applied so many steps.

        Of one that was resumed the first loss is not known: one from its middle is as
        likely to be half of the next as twice that, and says nothing.
        """
        begun = applied == self.losses.applied
        first = self.losses.first if begun else math.nan
        return replace(self.losses, first=first, applied=applied)


def found(
    session: Session,
    work: Work,
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    seed: Callable[[], None],
    *,
    scale: float,
    losses: Losses,
    failed: bool,
) -> BadOp | None:
    """Run the micro-batches of a step again; return the first fault on any process.

    That of their sum, where each is finite.

    All processes must call it: they tell each other what they found. A step that cannot
    be run again, for want of memory perhaps, ends nothing: that is said in a warning.

    Args:
        session: Its weights are those of the failing step.
        work: Of the step.
        loss_of: Computes the summed loss of a micro-batch.
        seed: Seeds what the step drew from.
        scale: Loss scale of the step.
        losses: Of the steps applied before.
        failed: The step was seen to fail, from these very weights.
    """
    world = process_group.size()
    weight = world / work.weight  # as the session divides by the micro-batches
    unread: list[str] = []

    def of(place: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            if place == 0:
                seed()
            return loss_of(work.parts[place]) * work.real[place] * weight

        return step

    def look() -> BadOp | None:
        try:
            return first_bad(
                session.model,
                [of(place) for place in range(len(work.parts))],
                scale=scale,
                number=work.number,
                losses=losses,
                # Masters add gradients up in float32; without, they stay as they are.
                summed_in=torch.float32 if session.choice.level.masters else None,
            )
        except Exception as error:  # noqa: BLE001
            # Not to know the cause must not end a run that may yet go on.
            unread.append(f"{type(error).__name__}: {error}".splitlines()[0])
            return None

    for _ in range(2 if failed else 1):
        bad = process_group.first_given(look())
        if bad is not None:
            return bad
    reason = process_group.first_given(next(iter(unread), None))
    if reason is not None:
        message = f"step {work.number} failed, and could not be run again: {reason}"
        warnings.warn(message, stacklevel=2)
        return None
    return not_reproduced(work.number, scale, len(work.parts)) if failed else None

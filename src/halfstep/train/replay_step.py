"""A step of the training program that failed, run again to see why.

In: the records of steps, and the batch of the failing one. Out: a `BadOp` for the
metrics and the error that ends the run.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.replay import find_nonfinite, not_reproduced
from halfstep.distributed import process_group
from halfstep.scaling.collapse import LossHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from halfstep.nonfinite.origin import BadOp
    from halfstep.session.session import Session
    from halfstep.train.step_dataset import StepBatch

SKIPS_BEFORE_REPLAY = 5
"""In a row, after which even a scale that still falls is looked into. From 2**16, a
usual start loses about two; five are a factor of 32."""

MAX_REPLAYS = 10
"""Replays of a run: each takes as long as tens of steps, and the first ones tell."""


@dataclass
class SkipWatcher:
    """Says when a step is worth running again."""

    losses: LossHistory = field(default_factory=LossHistory)
    """Of the steps applied."""
    consecutive_skips: int = 0
    """Steps skipped since the last one applied."""
    replays_left: int = MAX_REPLAYS

    def should_replay(self, record: Mapping[str, Any], *, is_dynamic: bool) -> bool:
        """Take in the record of a step; say whether it should be run again.

        Once in a row of skips: at the first where no scale can mend it, since the loss
        is not finite or the scale is fixed; otherwise after `SKIPS_BEFORE_REPLAY`.

        Args:
            record: Of the step.
            is_dynamic: The loss scale falls when steps are skipped.
        """
        if not record["skipped"]:
            if math.isfinite(record["loss"]):
                self.losses.add(record["loss"])
            self.consecutive_skips = 0
            return False
        self.consecutive_skips += 1
        hopeless = not (is_dynamic and math.isfinite(record["loss"]))
        is_due = (
            self.consecutive_skips == (1 if hopeless else SKIPS_BEFORE_REPLAY)
            and self.replays_left > 0
        )
        self.replays_left -= is_due
        return is_due

    def history(self, applied: int) -> LossHistory:
        """Return the losses of a run that has applied so many steps.

        Of one that was resumed the first loss is not known: one from its middle is as
        likely to be half of the next as twice that, and says nothing.
        """
        begun = applied == self.losses.applied
        first = self.losses.first if begun else math.nan
        return replace(self.losses, first=first, applied=applied)


def replay(
    session: Session,
    batch: StepBatch,
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    seed: Callable[[], None],
    *,
    scale: float,
    losses: LossHistory,
    failed: bool,
) -> BadOp | None:
    """Run the micro-batches of a step again; return the first fault on any process.

    That of their sum, where each is finite. All processes must call it. A step that
    cannot be run again, for want of memory perhaps, ends nothing: that is a warning.

    Args:
        session: Its weights are those of the failing step.
        batch: Of the step.
        loss_of: Computes the summed loss of a micro-batch.
        seed: Seeds what the step drew from.
        scale: Loss scale of the step.
        losses: Of the steps applied before.
        failed: The step was seen to fail, from these very weights.
    """
    world = process_group.world_size()
    weight = world / batch.weight  # as the session divides by the micro-batches
    failures: list[str] = []

    def of(place: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            if place == 0:
                seed()
            return loss_of(batch.parts[place]) * batch.is_real[place] * weight

        return step

    def search() -> BadOp | None:
        try:
            return find_nonfinite(
                session.model,
                [of(place) for place in range(len(batch.parts))],
                scale=scale,
                number=batch.number,
                losses=losses,
                # Masters add gradients up in float32; without, they stay as they are.
                summed_in=torch.float32 if session.choice.level.masters else None,
            )
        except Exception as error:  # noqa: BLE001
            # Not to know the cause must not end a run that may yet go on.
            failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            return None

    for _ in range(2 if failed else 1):
        origin = process_group.first_not_none(search())
        if origin is not None:
            return origin
    reason = process_group.first_not_none(next(iter(failures), None))
    if reason is not None:
        message = f"step {batch.number} failed, and could not be run again: {reason}"
        warnings.warn(message, stacklevel=2)
        return None
    return not_reproduced(batch.number, scale, len(batch.parts)) if failed else None

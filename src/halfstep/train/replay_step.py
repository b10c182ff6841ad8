"""Replays a failed training step to find the op that made the first inf or NaN."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
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
"""Consecutive skips after which a step is replayed although the scale can still fall.
From 2**16, a normal start skips about two steps; five are a factor of 32."""

MAX_REPLAYS = 10
"""Replays per run: each takes as long as tens of steps, and the first ones suffice."""


@dataclass
class SkipWatcher:
    """Decides when a skipped step should be replayed."""

    losses: LossHistory = field(default_factory=LossHistory)
    consecutive_skips: int = 0
    replays_left: int = MAX_REPLAYS

    def should_replay(self, record: Mapping[str, Any], *, is_dynamic: bool) -> bool:
        """Take the record of a step; return whether to replay that step.

        True once per run of consecutive skips: at the first if no smaller scale can
        help, because the loss is non-finite or the scale is fixed; otherwise at the
        `SKIPS_BEFORE_REPLAY`-th.
        """
        if not record["skipped"]:
            if math.isfinite(record["loss"]):
                self.losses.add(record["loss"])
            self.consecutive_skips = 0
            return False
        self.consecutive_skips += 1
        hopeless = not (is_dynamic and math.isfinite(record["loss"]))
        due_at = 1 if hopeless else SKIPS_BEFORE_REPLAY
        is_due = self.consecutive_skips == due_at and self.replays_left > 0
        self.replays_left -= is_due
        return is_due

    def history(self, applied: int) -> LossHistory:
        """Return the losses of a run that has applied this many steps.

        For a resumed run, `first` is NaN: a loss from the middle of training is no
        reference for detecting divergence.
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
    """Replay the micro-batches of a step; return the first BadOp of any rank.

    If each micro-batch is finite, their summed gradients are checked. A collective
    call. A step that cannot be replayed, for lack of memory perhaps, only warns.
    `loss_of` sums the loss of a micro-batch, `seed` seeds as in the step, and `failed`
    says that the step failed with exactly these weights.
    """
    world = process_group.world_size()
    weight = world / batch.weight  # the session divides by the number of micro-batches
    failures: list[str] = []

    def loss(place: int) -> Tensor:
        if place == 0:
            seed()
        return loss_of(batch.parts[place]) * batch.is_real[place] * weight

    def search() -> BadOp | None:
        try:
            return find_nonfinite(
                session.model,
                [partial(loss, place) for place in range(len(batch.parts))],
                scale=scale,
                number=batch.number,
                losses=losses,
                # Master weights accumulate gradients in float32, others do not.
                summed_in=torch.float32 if session.choice.level.masters else None,
            )
        except Exception as error:  # noqa: BLE001
            # A failed replay must not end a run that may recover.
            failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            return None

    for _ in range(2 if failed else 1):
        origin = process_group.first_not_none(search() or None)
        if origin is not None:
            return origin
    reason = process_group.first_not_none(next(iter(failures), None))
    if reason is not None:
        message = f"step {batch.number} failed, and could not be run again: {reason}"
        warnings.warn(message, stacklevel=2)
        return None
    return not_reproduced(batch.number, scale, len(batch.parts)) if failed else None

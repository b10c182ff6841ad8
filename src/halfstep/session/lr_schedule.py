"""Steps a learning-rate scheduler after applied steps only, not after skipped ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep._torch.async_read import DelayedScalars
from halfstep.errors import UserError, require_type, warn_caller
from halfstep.session.chained_optimizer import optimizers_of

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Raise if a scheduler's step needs arguments, or it has another optimizer."""
    if scheduler is None:
        return
    is_valid = not isinstance(scheduler, type) and callable(
        getattr(scheduler, "step", None)
    )
    expected = "a torch.optim.lr_scheduler.LRScheduler, or None"
    require_type("scheduler", scheduler, is_valid, expected)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            "scheduler is a ReduceLROnPlateau, which needs a metric: leave it out, and "
            "call its step(metric) yourself after each evaluation."
        )
    scheduler_optimizer = getattr(scheduler, "optimizer", optimizer)
    if not any(scheduler_optimizer is each for each in optimizers_of(optimizer)):
        raise UserError(
            f"the {type(scheduler).__name__} belongs to another optimizer than the "
            "session's: make it over session.optimizer."
        )


class LRSchedule:
    """Steps a scheduler once per applied optimizer step; `applied` are those so far."""

    def __init__(self, scheduler: LRScheduler | None, applied: int = 0) -> None:
        self.scheduler = scheduler
        self._num_followed = applied
        self._delayed = DelayedScalars()
        self._last_epoch: int | None = None
        """The scheduler's `last_epoch` after our last step."""
        self._warned = False

    def step(self, applied: Tensor) -> None:
        """Step the scheduler once for each applied step that is known on the host.

        On a GPU this is `async_read.DELAY_STEPS` steps late, to avoid synchronization.
        """
        if self.scheduler is None:
            return
        delayed_applied = self._delayed.submit((applied,))
        while delayed_applied and self._num_followed < delayed_applied[0]:
            self._warn_if_stepped_twice()
            self._num_followed += 1  # first: an interrupt must not step it twice
            self.scheduler.step()
            self._last_epoch = getattr(self.scheduler, "last_epoch", None)

    def _warn_if_stepped_twice(self) -> None:
        """Warn once if other code steps the schedule too."""
        if self._warned or self._last_epoch is None:
            return
        # Any other difference comes from a loaded state.
        if getattr(self.scheduler, "last_epoch", None) == self._last_epoch + 1:
            self._warned = True
            warn_caller(
                f"the {type(self.scheduler).__name__} was given to prepare, and is "
                "also stepped by hand, so it runs twice as fast: leave "
                "scheduler.step() out, or scheduler= of prepare."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and number of steps; {} without a scheduler."""
        if self.scheduler is None:
            return {}
        return {"followed": self._num_followed, "state": self.scheduler.state_dict()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise if a state is that of another type of scheduler."""
        if self.scheduler is None or not state:
            return
        # Another torch version has more keys or fewer; only another type has both.
        own, saved = self.scheduler.state_dict().keys(), state["state"].keys()
        if own - saved and saved - own:
            raise UserError(
                f"the state is of another schedule than {type(self.scheduler).__name__}"
                f": it has {sorted(saved - own)} and no {sorted(own - saved)}. Build "
                "the schedule that was saved."
            )

    def load_scheduler(self, state: dict[str, Any], undo: ExitStack) -> None:
        """Load the scheduler's own state; `undo` gets what restores the current one."""
        if self.scheduler is not None and state:
            before = copy.deepcopy(self.scheduler.state_dict())
            undo.callback(self.scheduler.load_state_dict, before)
            self.scheduler.load_state_dict(state["state"])

    def restart(self, state: dict[str, Any], applied: int) -> None:
        """Count from a loaded state; {} starts after `applied` optimizer steps."""
        has_state = self.scheduler is not None and bool(state)
        self._num_followed = state["followed"] if has_state else applied
        self._last_epoch, self._delayed = None, DelayedScalars()

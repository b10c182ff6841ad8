"""Steps a learning-rate scheduler after applied steps only, not after skipped ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep._torch.async_read import DelayedScalars
from halfstep.errors import UserError, require_type, warn_caller
from halfstep.session.chained_optimizer import optimizers_of

if TYPE_CHECKING:
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

    def load_state_dict(self, state: dict[str, Any], applied: int) -> None:
        """Load a state; {} starts the schedule after `applied` optimizer steps."""
        self._num_followed, self._last_epoch = applied, None
        self._delayed = DelayedScalars()
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state["state"])
            self._num_followed = state["followed"]

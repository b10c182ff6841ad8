"""A learning-rate schedule that follows applied steps only.

In: how many steps were applied, perhaps still on a device. Out: as many steps of the
schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.late import Late

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler


class Schedule:
    """A schedule, or none.

    Args:
        scheduler: To be stepped.
        applied: Steps applied before it came.
    """

    def __init__(self, scheduler: LRScheduler | None, applied: int = 0) -> None:
        self.scheduler = scheduler
        self._followed = applied
        self._late = Late()

    def step(self, applied: Tensor) -> None:
        """Step once for each applied step that is known of.

        On a GPU that is `late.LAG` steps late, where nobody waits for what was skipped.

        Args:
            applied: Steps applied so far, shape ().
        """
        if self.scheduler is None:
            return
        arrived = self._late.send((applied,))
        while arrived and self._followed < arrived[0]:
            self.scheduler.step()
            self._followed += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, and how far it has followed; {} without one."""
        if self.scheduler is None:
            return {}
        return {"followed": self._followed, "state": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any], applied: int) -> None:
        """Go on from a state.

        Args:
            state: Of a schedule, or {}: then this one begins here.
            applied: Steps applied so far.
        """
        self._followed, self._late = applied, Late()
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state["state"])
            self._followed = state["followed"]

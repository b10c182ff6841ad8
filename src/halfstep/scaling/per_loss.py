"""The loss scales of one training loop: one for all losses, or one for each name.

In: one rule; names of losses, and what their backward passes found. Out: scalers, made
when they are first asked for, that move by their own overflows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.scaling.loss_scaler import LossScaler
from halfstep.scaling.step_history import LossHistory, StepHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from halfstep.scaling.loss_scale import ScaleRule
    from halfstep.scaling.step_report import NonFiniteParam


class LossScalers:
    """Scalers by the name of their loss; "" for losses without a name.

    Args:
        rule: By which each begins and moves.
        group: As for `LossScaler`.
    """

    def __init__(self, rule: ScaleRule, group: dist.ProcessGroup | None = None) -> None:
        self.rule = rule
        self._group = group
        self._scalers: dict[str, LossScaler] = {}
        self._saved: dict[str, Any] = {}
        self._found_inf: dict[str, Tensor] = {}
        self._from_first_step = True

    def get_or_create(self, name: str, device: torch.device) -> LossScaler:
        """Return the scaler of a loss; it begins where a loaded state left it."""
        if name not in self._scalers:
            scaler = self._scalers[name] = LossScaler(self.rule, device, self._group)
            if name in self._saved:
                scaler.load_state_dict(self._saved.pop(name))
            elif not self._from_first_step:
                scaler.monitor.restore(
                    StepHistory(LossHistory(from_first_step=False)), self.rule
                )
        scaler = self._scalers[name]
        scaler.rule = self.rule
        return scaler

    def get(self, name: str) -> LossScaler:
        """Return the scaler of a loss that has been seen."""
        return self._scalers[name]

    def record_found_inf(self, name: str, found_inf: Tensor) -> None:
        """Take down what one backward pass of a loss found, shape ()."""
        previous = self._found_inf.get(name)
        combined = found_inf if previous is None else torch.maximum(previous, found_inf)
        self._found_inf[name] = combined

    def update(
        self, found_inf: Tensor, culprits: Callable[[], Sequence[NonFiniteParam]]
    ) -> None:
        """Move those scales that were used in this step.

        Args:
            found_inf: Of the whole step, for a loop that noted nothing.
            culprits: Says whose gradients were not finite.

        Raises:
            LossScaleCollapse: If skipping has gone on for too long.
        """
        flags, self._found_inf = self._found_inf, {}
        if not flags:
            self._scalers[""].update(found_inf, culprits)
        for name, flag in flags.items():
            self._scalers[name].update(flag, culprits, skipped=found_inf)

    def reset(self) -> None:
        """Leave out what was noted since the last step."""
        self._found_inf = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all states by name. Waits for the device."""
        current = {name: scaler.state_dict() for name, scaler in self._scalers.items()}
        return self._saved | current

    @staticmethod
    def check(state: dict[str, Any] | None) -> None:
        """Refuse states that cannot be loaded; None holds nothing to refuse.

        Raises:
            UserError: If a field is missing.
        """
        for one in (state or {}).values():
            LossScaler.check(one)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from saved states; a loss not seen yet when it is asked for.

        Args:
            state: By name; None: of a run that nobody watched, such as one of torch's.

        Raises:
            UserError: If a field is missing.
        """
        self.check(state)
        self._from_first_step = state is not None
        self._saved, self._found_inf = dict(state or {}), {}
        for name, scaler in list(self._scalers.items()):
            if name in self._saved:
                scaler.load_state_dict(self._saved.pop(name))
            else:
                del self._scalers[name]  # it begins anew

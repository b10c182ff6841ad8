"""Implements amp's loss scalers: halfstep's `LossScaler` with apex's names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from halfstep.scaling import LossScaler, ScaleRule
from halfstep.scaling.step_report import find_nonfinite_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from halfstep.compat.apex.optimizer_state import AmpOptimizerState
    from halfstep.scaling.step_report import NonFiniteParam

FIRST_SCALE = 2.0**16


def rule_of(
    loss_scale: float | str, min_loss_scale: float | None, max_loss_scale: float
) -> ScaleRule:
    """Return the rule of a loss scale.

    Args:
        loss_scale: "dynamic", or a constant.
        min_loss_scale: Minimum. None: 1; apex had no minimum and fell to 0.
        max_loss_scale: Maximum.

    Raises:
        UserError: If they contradict each other.
    """
    if loss_scale != "dynamic":
        return ScaleRule.parse(loss_scale)
    first = min(max_loss_scale, FIRST_SCALE)
    floor = min_loss_scale or min(1.0, first)
    first = min(max(first, floor), max_loss_scale)
    return ScaleRule(first, min_scale=floor, max_scale=max_loss_scale)


class AmpScaler:
    """A loss scale with a found_inf flag that is not read yet, and its optimizers.

    Args:
        loss_id: Number of the loss.
        rule: Rule of the loss scale.
        device: Device of the losses.
        name_of: Returns the name of a parameter.
    """

    def __init__(
        self,
        loss_id: int,
        rule: ScaleRule,
        device: torch.device,
        name_of: Callable[[Tensor], str],
    ) -> None:
        self.loss_id = loss_id
        self.scaler = LossScaler(rule, device)
        self._name_of = name_of
        self._found_inf: Tensor | None = None
        self._pending_optimizers: list[AmpOptimizerState] = []

    @property
    def dynamic(self) -> bool:
        """Whether the scale is dynamic."""
        return self.scaler.rule.backoff_factor < 1

    def loss_scale(self) -> float:
        """Return the scale. Synchronizes with the device."""
        return float(self.scaler.state.scale)

    @property
    def _loss_scale(self) -> float:
        """The scale, under a name that programs for apex read and set."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.set_state(value, self._unskipped)

    @property
    def _unskipped(self) -> int:
        return int(self.scaler.state.clean_steps)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.set_state(self.loss_scale(), value)

    def set_state(self, scale: float, unskipped: int) -> None:
        """Set the scale and the number of steps since the last overflow or growth."""
        state = self.scaler.state
        self.scaler.set_state(
            torch.full_like(state.scale, scale),
            torch.full_like(state.clean_steps, unskipped),
        )
        self.scaler.monitor.on_external_set(scale)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss in fp32, times the scale."""
        self.scaler.observe_loss(loss, self._name_of)
        return self.scaler.scale(loss)

    def unscale_(
        self, gradients: list[Tensor], optimizers: list[AmpOptimizerState]
    ) -> None:
        """Divide gradients by the scale in place, and check them.

        Args:
            gradients: Gradients of one backward pass.
            optimizers: The optimizers of these gradients.
        """
        found_inf = self.scaler.unscale_(gradients)
        if self._found_inf is not None:
            found_inf = torch.maximum(found_inf, self._found_inf)
        self._found_inf = found_inf
        for optimizer in optimizers:
            if optimizer not in self._pending_optimizers:
                self._pending_optimizers.append(optimizer)
                optimizer.unchecked.append(self)

    def finish_check(self) -> None:
        """Read found_inf, update the scale, and mark optimizers that must skip.

        Raises:
            LossScaleCollapse: If skipping has gone on for too long.
        """
        found_inf, optimizers = self._found_inf, self._pending_optimizers
        if found_inf is None:
            return
        self._found_inf, self._pending_optimizers = None, []
        for optimizer in optimizers:
            optimizer.unchecked.remove(self)
            if found_inf:
                optimizer.skipped_by = self
        self.scaler.update(found_inf, partial(self._nonfinite_params, optimizers))

    def _nonfinite_params(
        self, optimizers: list[AmpOptimizerState]
    ) -> tuple[NonFiniteParam, ...]:
        pairs = [
            (self._name_of(optimizer.stored(param)), param.grad)
            for optimizer in optimizers
            for group in optimizer.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        return find_nonfinite_params(pairs)

    def skip_message(self) -> str:
        """Return apex's message about a skipped step."""
        start = f"Gradient overflow.  Skipping step, loss scaler {self.loss_id}"
        if self.dynamic:
            return f"{start} reducing loss scale to {self.loss_scale()}"
        return f"{start} has a static loss scale of {self.loss_scale()}"

    def state_dict(self) -> dict[str, float | int]:
        """Return the two values that apex saves."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

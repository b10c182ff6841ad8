"""Implements apex's older loss scalers, static and dynamic, with halfstep's rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep import scaling
from halfstep.scaling import ScaleRule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """A constant loss scale."""

    dynamic = False

    def __init__(self, scale: float = 1) -> None:
        self.core = scaling.LossScaler(ScaleRule.parse(scale))

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return float(self.core.state.scale)

    @property
    def cur_scale(self) -> float:
        """The same, under apex's other name."""
        return self.loss_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient is non-finite; apex's static one did not check."""
        return any(
            not bool(param.grad.isfinite().all())
            for param in params
            if param.grad is not None
        )

    def update_scale(self, overflow: bool) -> None:
        """Update the scale for the next step.

        Raises:
            LossScaleCollapse: If overflow has gone on for too long.
        """
        self.core.update(torch.tensor(float(overflow)))

    def scale_gradient(
        self, _module: object, grad_in: tuple[Tensor, ...], _grad_out: object
    ) -> tuple[Tensor, ...]:
        """Multiply gradients by the scale: a full backward hook for modules."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the loss times the scale."""
        self.core.observe_loss(loss)
        self.core.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """A loss scale that grows after steps without overflow and falls on overflow.

    Args:
        init_scale: First scale.
        scale_factor: Factor by which it grows or falls.
        scale_window: Steps without overflow before it grows.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
    ) -> None:
        rule = ScaleRule(
            init_scale,
            scale_factor,
            1 / scale_factor,
            scale_window,
            max_scale=_LARGEST,
        )
        self.core = scaling.LossScaler(rule)

"""Implements apex's LARC: a learning rate for each parameter, with any optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


class LARC:
    """Layer-wise adaptive rate control over any optimizer.

    Formula, for each parameter w with gradient g, weight decay d, learning rate lr:

        trust = trust_coefficient * |w| / (|g| + d * |w| + eps)
        factor = min(trust / lr, 1) if clip else trust
        g' = factor * (g + d * w)

    The wrapped optimizer then steps with g' and no weight decay of its own. A parameter
    whose weights or gradients are all zero keeps its gradient, without decay.

    Args:
        optimizer: Any optimizer; its groups may have a `weight_decay`.
        trust_coefficient: Size of a step relative to the norm of the parameter.
        clip: Limit the rate to the optimizer's learning rate; False: multiply both.
        eps: Avoids division by zero.

    References:
        You et al., "Large Batch Training of Convolutional Networks", 2017.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return any other attribute of the optimizer, such as `state_dict`."""
        if name == "optim":  # not set yet while an instance is copied or unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        """Return the repr of the optimizer."""
        return repr(self.optim)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Scale the gradients, then call the optimizer's step.

        Args:
            closure: Computes loss and gradients; called once, before they are scaled.

        Returns:
            The result of the closure, or else of the optimizer's step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.optim.param_groups
        decays = [group.get("weight_decay") for group in groups]
        for group in groups:
            self._scale(group)
        try:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = 0.0
            result = self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    @torch.no_grad()
    def _scale(self, group: dict[str, Any]) -> None:
        """Multiply the gradients of a group, without device synchronization."""
        decay = group.get("weight_decay") or 0.0
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            weight_norm, grad_norm = _norm(param), _norm(grad)
            trust = self.trust_coefficient * weight_norm
            trust = trust / (grad_norm + decay * weight_norm + self.eps)
            factor = (trust / group["lr"]).clamp(max=1.0) if self.clip else trust
            moves = (weight_norm != 0) & (grad_norm != 0)
            factor = torch.where(moves, factor, 1.0)
            if decay:
                grad.add_(param * torch.where(moves, decay, 0.0))
            grad.mul_(factor)


def _norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm in fp32, since sums of squares overflow in fp16."""
    wide = None if tensor.dtype is torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm

"""An optimizer's parameters: their gradients, and the best names there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients there are, in the order of the parameters."""
    return [
        gradient
        for group in optimizer.param_groups
        for param in group["params"]
        if (gradient := param.grad) is not None
    ]


def first_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the first gradient there is, without looking at the others."""
    every = (
        param.grad for group in optimizer.param_groups for param in group["params"]
    )
    return next((gradient for gradient in every if gradient is not None), None)


def named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, named as the optimizer was told, or by group and place."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            place = f"group {number} parameter {index} {tuple(param.shape)}"
            yield (names[index] if names else place), param


def name_of(param: Tensor, optimizers: Iterable[Optimizer]) -> str:
    """Return the name of a parameter in one of some optimizers."""
    for optimizer in optimizers:
        for name, candidate in named_parameters(optimizer):
            if candidate is param:
                return name
    return f"a parameter of shape {tuple(param.shape)}"


def coalesce(optimizer: Optimizer) -> None:
    """Add up what sparse gradients hold for the same place.

    Why: two finite fp16 numbers may give inf, which must be seen before the step.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()

"""Reads an optimizer's parameters, their gradients and parameter names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, once each: torch allows repeats in one."""
    groups = optimizer.param_groups
    return [*{id(p): p for group in groups for p in group["params"]}.values()]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that are not None, in the order of the parameters."""
    grads = [param.grad for param in params_of(optimizer)]
    return [grad for grad in grads if grad is not None]


def first_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the first gradient that is not None; later ones are not read."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.grad for p in params if p.grad is not None), None)


def named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter), named by the optimizer, or by group and index."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            place = f"group {number} parameter {index} {tuple(param.shape)}"
            yield (names[index] if names else place), param


def name_of(param: Tensor, optimizers: Iterable[Optimizer]) -> str:
    """Return the name of a parameter of one of the optimizers."""
    for optimizer in optimizers:
        for name, candidate in named_parameters(optimizer):
            if candidate is param:
                return name
    return unnamed(param)


def unnamed(param: Tensor) -> str:
    """Return what a parameter without a name is called in messages."""
    return f"a parameter of shape {tuple(param.shape)}"


def coalesce(optimizer: Optimizer) -> None:
    """Coalesce sparse gradients, which adds up values at duplicate indices.

    Why: the sum of two finite fp16 values may be inf, which the check must see.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()

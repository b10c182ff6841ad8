"""Optimizers that evaluate the model inside their step, and may have to take it back.

In: an optimizer whose step calls a closure once or more (LBFGS, SAM). Out: the step
taken, or, if an evaluation overflowed, everything as it was before.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Overflow(Exception):  # noqa: N818 -- a signal, not an error
    """An evaluation inside a step left inf or NaN in the gradients."""


def step_or_take_back(
    optimizer: torch.optim.Optimizer,
    evaluate: Callable[[], Any],
    overflowed: Callable[[], bool],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Step an optimizer with a closure; undo all of it if an evaluation overflows.

    Why: by the time the second evaluation of a line search overflows, the first has
    moved the weights. Costs a copy of weights and state for the time of the step.

    Args:
        optimizer: Its weights, state and settings are put back.
        evaluate: Clears gradients, computes the loss, fills in unscaled gradients.
        overflowed: Says whether the gradients of the last evaluation were not finite.
        args: For the optimizer's step.
        kwargs: For the optimizer's step.

    Returns:
        What the step returned; None if it was taken back.
    """
    weights = {
        p: p.detach().clone() for g in optimizer.param_groups for p in g["params"]
    }
    state = {param: deepcopy(value) for param, value in optimizer.state.items()}
    settings = [_settings(group) for group in optimizer.param_groups]

    def checked() -> Any:
        loss = evaluate()
        if overflowed():
            raise _Overflow
        return loss

    try:
        return optimizer.step(checked, *args, **kwargs)
    except _Overflow:
        _restore(weights)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        return None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: deepcopy(value) for key, value in group.items() if key != "params"}


@torch.no_grad()
def _restore(weights: dict[Tensor, Tensor]) -> None:
    for param, before in weights.items():
        param.copy_(before)

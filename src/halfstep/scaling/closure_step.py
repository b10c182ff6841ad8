"""Steps with a closure (LBFGS, SAM), undone if an evaluation overflows.

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


def step_or_undo(
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
    saved_states = [(each, _copy_state(each)) for each in _with_inner(optimizer)]

    def checked() -> Any:
        loss = evaluate()
        if overflowed():
            raise _Overflow
        return loss

    try:
        return optimizer.step(checked, *args, **kwargs)
    except _Overflow:
        _restore(weights)
        for each, (state, settings) in saved_states:
            each.state.clear()
            each.state.update(state)
            for group, saved_group in zip(each.param_groups, settings, strict=True):
                params = group["params"]
                group.clear()
                group.update(saved_group, params=params)
        return None


def _with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those it works with, as SAM does with its base."""
    inner = [
        v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)
    ]
    return [optimizer, *(each for one in inner for each in _with_inner(one))]


def _copy_state(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, Any], list[Any]]:
    """Return copies of an optimizer's state, and of its settings by group."""
    state = {param: deepcopy(value) for param, value in optimizer.state.items()}
    settings = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return state, settings


@torch.no_grad()
def _restore(weights: dict[Tensor, Tensor]) -> None:
    for param, before in weights.items():
        param.copy_(before)

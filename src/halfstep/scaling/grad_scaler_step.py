"""Steps fused optimizers, and optimizers with a closure, for `GradScaler`.

The kernels of fused optimizers skip on overflow themselves. A closure evaluates the
model inside `step`; if an evaluation overflows, the whole step is undone.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from halfstep._torch import fused_optimizers
from halfstep._torch.optimizer_params import gradients_of
from halfstep.scaling import misuse
from halfstep.scaling.unscale import max_flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer


def step_fused(
    scaler: GradScaler,
    optimizer: Optimizer,
    state: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Step an optimizer whose kernel itself skips, without synchronization."""
    if _takes_grad_scaler(optimizer.step):
        return GradScaler.step(scaler, optimizer, *args, **kwargs)  # torch's old API
    factor = getattr(optimizer, "grad_scale", None)
    scale, _ = scaler._check_scale_growth_tracker("step")  # noqa: SLF001
    if state["stage"] is OptState.READY:
        scaler._check_inf_per_device(optimizer)  # noqa: SLF001 -- torch's protocol
        factor = scale if factor is None else scale * factor
    flags = [*state["found_inf_per_device"].values()]
    if not flags and gradients_of(optimizer):
        # Gradients would be applied unchecked; torch raises here too, by accident.
        raise misuse.no_gradients(optimizer)
    found_inf = max_flag(flags or [torch.zeros_like(scale)], scale.device)
    return fused_optimizers.step(optimizer, found_inf, factor, *args, **kwargs)


def _takes_grad_scaler(step: Callable[..., Any]) -> bool:
    """Return whether `step` takes a `grad_scaler`; `inspect.signature` takes 50 us."""
    inner = inspect.unwrap(step, stop=lambda f: hasattr(f, "__signature__"))
    code = getattr(inner, "__code__", None)
    if code is None:
        return "grad_scaler" in inspect.signature(step).parameters
    return (
        "grad_scaler" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    )


def step_with_closure(
    scaler: GradScaler,
    closure: Callable[[], Any],
    optimizer: Optimizer,
    state: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Step an optimizer that evaluates the model inside; None if it was undone."""

    def overflowed() -> bool:
        return any(map(bool, state["found_inf_per_device"].values()))

    def evaluate() -> Any:
        state["stage"] = OptState.READY
        loss = closure()
        if state["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        return loss

    if overflowed():
        return None
    return step_or_undo(optimizer, evaluate, overflowed, *args, **kwargs)


class _Overflow(Exception):  # noqa: N818 -- a signal, not an error
    """Gradients of an evaluation inside a step hold inf or NaN."""


def step_or_undo(
    optimizer: torch.optim.Optimizer,
    evaluate: Callable[[], Any],
    overflowed: Callable[[], bool],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Step an optimizer with a closure; undo all of it if an evaluation overflows.

    Why: when the second evaluation of a line search overflows, the first has already
    changed the weights. Costs a copy of weights and state during the step.

    Args:
        optimizer: Its weights, state and hyper-parameters are restored.
        evaluate: Clears gradients, computes the loss, leaves unscaled gradients.
        overflowed: Returns whether gradients of the last evaluation were non-finite.
        args: For the optimizer's step.
        kwargs: For the optimizer's step.

    Returns:
        The return value of the step; None if it was undone.
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
    """Return an optimizer and those inside it, such as the base of SAM."""
    inner = [
        v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)
    ]
    return [optimizer, *(each for one in inner for each in _with_inner(one))]


def _copy_state(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, Any], list[Any]]:
    """Return copies of an optimizer's state and of its groups' hyper-parameters."""
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

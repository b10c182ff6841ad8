"""torch's fused optimizers, whose kernels themselves skip the step on overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch.async_read import to_device_async

if TYPE_CHECKING:
    from torch import Tensor


def handles_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernel checks `found_inf` itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step(
    optimizer: Any,
    found_inf: Tensor,
    grad_scale: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Step unless `found_inf` is 1; return what `optimizer.step` returns.

    The optimizer must satisfy `handles_found_inf`. `found_inf` is 0.0 or 1.0, shape ();
    the kernel divides gradients by `grad_scale`.
    """
    before = len(optimizer.state)
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    if len(optimizer.state) > before:
        _zero_new_momentum(list(optimizer.state.values())[before:], found_inf)
    return result


def _zero_new_momentum(new_states: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Zero the momentum buffers that a skipped step has just allocated.

    Why: fused SGD allocates them uninitialized, and a kernel that skips leaves them so;
    the next step would use that memory. As a side effect dampening applies one step
    early: on a GPU the host cannot know in time that there is no momentum yet.
    """
    for state in new_states:
        buffer = state.get("momentum_buffer")
        if torch.is_tensor(buffer):
            buffer.masked_fill_(to_device_async(found_inf, buffer.device) > 0, 0)

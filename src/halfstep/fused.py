"""torch's fused optimizers, whose kernel itself leaves everything alone on overflow.

In: an optimizer and a flag on the device. Out: the step, taken or skipped, without
waiting for the flag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor


def skips_inside(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's kernel looks at `found_inf` itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step(optimizer: Any, found_inf: Tensor) -> None:  # noqa: ANN401 -- takes attributes
    """Step unless `found_inf` is 1.

    Args:
        optimizer: One that `skips_inside`, its gradients unscaled.
        found_inf: 0.0 or 1.0, shape (); kernels compare it with 1.
    """
    known = set(optimizer.state)
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    clear_new_state(optimizer, known, found_inf)


def clear_new_state(
    optimizer: torch.optim.Optimizer, known: Collection[Tensor], found_inf: Tensor
) -> None:
    """Set state that a skipped step was the first to make to zero.

    Why: fused SGD allocates its momentum without filling it, and a kernel that then
    skips leaves it so. The next step would add whatever lay in that memory.

    Args:
        optimizer: Just stepped.
        known: Parameters that had state before the step.
        found_inf: Not zero if the step was skipped. Shape ().
    """
    for param in optimizer.state.keys() - known:
        for value in optimizer.state[param].values():
            if torch.is_tensor(value):
                value.masked_fill_(found_inf.to(value.device) > 0, 0)

"""Accumulates 16-bit gradients in fp32, in the gradients of the master weights.

In: a slot whose weight has a gradient. Out: the gradient added to its master's, and
freed.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from halfstep.masters import cpu_kernels
from halfstep.masters.encoding import PLAIN
from halfstep.masters.update_rules import ParamUpdate, Sgd
from halfstep.numerics.accumulate import add_

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.masters.encoding import MasterParam


def accumulate_in_backward(
    master_param: MasterParam, is_enabled: Callable[[], bool]
) -> None:
    """Fold from now on as soon as a backward pass has made a gradient.

    Args:
        master_param: Of the weight.
        is_enabled: Asked each time.
    """

    def on_gradient(_: Tensor) -> None:
        if is_enabled():
            accumulate_(master_param)

    if master_param.weight.requires_grad and not master_param.is_hooked:
        master_param.is_hooked = True
        master_param.weight.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]


@torch.no_grad()
def accumulate_(master_param: MasterParam) -> None:
    """Add a 16-bit gradient to its master's, and free it."""
    gradient, master_param.weight.grad = master_param.weight.grad, None
    if gradient is None:
        return
    total = master_param.master.grad
    if gradient.is_sparse or (total is not None and total.is_sparse):
        wide = gradient.float()
        if total is not None:
            # torch adds sparse to dense, and not the other way round.
            wide = wide + total if total.is_sparse else total + wide
        master_param.master.grad = wide
    elif total is None:
        if master_param.grad_buffer is None:
            master_param.grad_buffer = torch.empty_like(
                master_param.weight, dtype=torch.float32
            )
        master_param.master.grad = master_param.grad_buffer.copy_(gradient).detach()
    elif _suits_kernel(total, gradient):
        item = ParamUpdate(
            total, gradient, None, (), None, is_first_step=False, param_index=0
        )
        one = torch.ones(())
        cpu_kernels.update([item], _SUM, PLAIN, inverse=one, clock=(0, 0))
        torch.autograd.graph.increment_version(total)
    else:
        add_(total, gradient)


_SUM = Sgd(-1.0, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
"""A step of SGD at a rate of -1 adds the gradient to the weight, in one pass."""
_LARGE = 1 << 16
"""Numbers from which it pays to call a kernel."""


def _suits_kernel(total: Tensor, part: Tensor) -> bool:
    return (
        total.is_cpu
        and total.numel() >= _LARGE
        and total.is_contiguous()
        and part.is_contiguous()
        and cpu_kernels.available()
    )


def clear_low_grads_too(optimizer: Optimizer, clear: Callable[[], None]) -> None:
    """Let `optimizer.zero_grad` also clear the 16-bit gradients behind its masters."""
    own = optimizer.zero_grad

    @wraps(own)
    def zero_grad(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        own(*args, **kwargs)
        clear()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

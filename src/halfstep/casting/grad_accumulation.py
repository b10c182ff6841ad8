"""Accumulates 16-bit gradients in the fp32 `.grad` of weights, reusing buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from halfstep._torch.storage_references import is_shared
from halfstep.numerics.accumulate import add_
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle


class Fp32GradAccumulator:
    """Adds 16-bit gradients to the fp32 `.grad` of weights during one backward pass.

    Why: autograd casts each gradient to fp32 in new memory, then adds it in a second
    pass. Use it only for backward passes whose gradients all go to `.grad`. DDP's
    hooks on a weight still run, after the gradient has been added.
    """

    def __init__(self) -> None:
        self._graph_task: int | None = None
        self._hook: RemovableHandle | None = None
        self._buffers: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def start(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss, in its next backward pass."""

        def record_task(_: Tensor) -> None:
            self._graph_task = torch._C._current_graph_task_id()  # noqa: SLF001

        self._hook = None
        if loss.requires_grad:
            self._hook = loss.register_hook(record_task)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop accumulating."""
        self._graph_task = None
        if self._hook is not None:
            self._hook.remove()

    def accumulate(self, weight: Tensor, gradient: Tensor) -> bool:
        """Add a gradient to `weight.grad`; return False if autograd must do it.

        It must if the weight has hooks, which need the gradient, or if the backward
        pass itself is recorded (`create_graph=True`).
        """
        hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # noqa: SLF001
        if (
            self._graph_task is None
            or self._graph_task != torch._C._current_graph_task_id()  # noqa: SLF001
            or hooks
            or torch.is_grad_enabled()
            or gradient.layout != torch.strided
            or not is_low(gradient.dtype)
            or (weight.grad is not None and weight.grad.layout != torch.strided)
        ):
            return False
        if weight.grad is not None:
            add_(weight.grad, gradient)
            return True
        if weight.device.type != "cpu":
            # The caching allocator makes new memory cheap; a buffer would occupy it.
            weight.grad = gradient.to(weight.dtype)
            return True
        buffer = self._buffers.get(weight)
        if buffer is None or buffer.shape != weight.shape or is_shared(buffer):
            buffer = self._buffers[weight] = torch.empty_like(weight)
        weight.grad = buffer.copy_(gradient).detach()
        return True

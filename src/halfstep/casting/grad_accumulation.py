"""16-bit gradients added up in fp32, without fresh memory.

In: a weight and a 16-bit gradient. Out: the weight's `.grad` in fp32; on a CPU in a
buffer that serves every step again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.numerics.accumulate import add_
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle


_OWN_REFS = 2
"""Holders of a buffer's memory that are no others': the buffer, and who counts."""


class Fp32GradAccumulator:
    """Adds 16-bit gradients to those of fp32 weights, in one backward pass.

    Why: autograd casts each one to fp32 in fresh memory and adds it in a second pass.
    It may do so only in a backward pass whose gradients all go to `.grad`. What DDP
    has attached to a weight still runs, after the gradient is in its place.
    """

    def __init__(self) -> None:
        self._graph_task: int | None = None
        self._hook: RemovableHandle | None = None
        self._buffers: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def start(self, loss: Tensor) -> None:
        """Take in the gradients of a loss, of whose backward pass this is the first."""

        def record_task(_: Tensor) -> None:
            self._graph_task = torch._C._current_graph_task_id()  # noqa: SLF001

        self._hook = None
        if loss.requires_grad:
            self._hook = loss.register_hook(record_task)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Take in no more."""
        self._graph_task = None
        if self._hook is not None:
            self._hook.remove()

    def accumulate(self, weight: Tensor, gradient: Tensor) -> bool:
        """Add a gradient to `weight.grad`; say no where autograd must do it.

        Hooks on the weight must see its gradient, and a graph of the backward pass
        needs one.
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
            # There fresh memory costs nothing, and kept memory is missed elsewhere.
            weight.grad = gradient.to(weight.dtype)
            return True
        buffer = self._buffers.get(weight)
        if buffer is None or buffer.shape != weight.shape or _is_shared(buffer):
            buffer = self._buffers[weight] = torch.empty_like(weight)
        weight.grad = buffer.copy_(gradient).detach()
        return True


def _is_shared(buffer: Tensor) -> bool:
    """Say whether anything else has the memory: a gradient that somebody has kept."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > _OWN_REFS  # noqa: SLF001

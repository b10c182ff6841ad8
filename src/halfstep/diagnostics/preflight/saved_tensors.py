"""What one pass keeps for its backward pass, and how large its gradients are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from halfstep.numerics.exponents import BINS, count_exponents
from halfstep.scaling.strategies import nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.autograd.graph import Node


class SavedBytes:
    """Counts the bytes that a forward pass keeps for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        self._seen = {one.untyped_storage().data_ptr() for one in own}
        self.bytes = 0

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return what counts while it is open."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor.detach()  # not itself: an output would hold its own graph


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class GradientExponents:
    """Counts the exponents of gradients of one dtype, scaled, as they flow.

    Single numbers are left out: what makes the loss out of means computes in fp32. With
    dtype None it counts nothing.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        # Each device has an autograd thread of its own.
        self._counts: dict[torch.device, Tensor] = {}

    @contextlib.contextmanager
    def over(self, loss: Tensor) -> Iterator[None]:
        """Look at what comes to each node of the graph of a loss."""
        if self._dtype is None:
            yield
            return
        assert loss.grad_fn is not None  # noqa: S101 -- it was checked
        nodes = [node for node in nodes_of(loss.grad_fn) if not is_leaf(node)]
        handles = [node.register_prehook(self._look) for node in nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, gradients: Sequence[Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self.add(gradient)

    def add(self, gradient: Tensor) -> None:
        """Count one gradient."""
        if gradient.dtype == self._dtype and gradient.ndim:
            before = self._counts.get(gradient.device, 0)
            self._counts[gradient.device] = before + count_exponents(gradient)

    def total(self) -> Tensor:
        """Return the counts of all devices. int64, shape (BINS,), on the CPU."""
        total = torch.zeros(BINS, dtype=torch.int64)
        for counts in self._counts.values():
            total += counts.cpu()
        return total


def is_leaf(node: Node) -> bool:
    """Say whether a node puts a gradient into a leaf, such as a weight."""
    return type(node).__name__ == "AccumulateGrad"

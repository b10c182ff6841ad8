"""Defines the operations that a probe adds to graphs of torch.compile.

In forward and backward they write flags or pass tensors to the probe at run time.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.numerics.tensor_counts import DTYPES

UNSEEN = -1.0
"""Value of a flag that was not written; a written flag is 1 for inf or NaN, else 0."""


observers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""id() by which graphs refer to the hooks that receive their tensors -> hooks."""


@torch.library.custom_op("halfstep::observe", mutates_args=("flags",))
def observe(flags: Tensor, value: Tensor, observer: int, name: int) -> None:  # noqa: ARG001
    """Pass a tensor to a probe at run time; mutating `flags` keeps it in the graph.

    Statistics are taken in some steps only; in the graph itself, that would cause a
    recompilation.
    """
    target = observers.get(observer)
    if target is not None:
        target.at_run_time(name, value)


@observe.register_fake
def _observe_fake(flags: Tensor, value: Tensor, observer: int, name: int) -> None:
    """Do nothing to fake tensors."""


def _write(flags: Tensor, index: int, value: Tensor, observer: int, name: int) -> None:
    """Write in the graph whether a tensor is non-finite, or pass it to an observer."""
    if observer:
        observe(flags, value, observer, name)
        return
    real = torch.view_as_real(value) if value.is_complex() else value
    nonfinite = torch.isfinite(real).logical_not().any().to(flags.dtype)
    flags[index].copy_(torch.maximum(flags[index], nonfinite))


class ObserveGrad(torch.autograd.Function):
    """Identity function whose gradient is observed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's own
        value: Tensor,
        flags: Tensor,
        index: int,
        observer: int,
        name: int,
    ) -> Tensor:
        """Return a view of the tensor."""
        ctx.flags, ctx.target = flags, (index, observer, name)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Observe the gradient and return it unchanged."""
        index, observer, name = ctx.target
        (gradient,) = gradients
        _write(ctx.flags, index, gradient.detach(), observer, name)
        return gradient, None, None, None, None


def observed(
    output: Any,  # noqa: ANN401 -- whatever a module returns
    flags: tuple[Tensor, Tensor],
    index: int,
    observer: int,
    names: tuple[int, int],
) -> Any:  # noqa: ANN401
    """Return a module's output with the operations that observe it in a graph.

    `flags` are those of outputs and of gradients, one element for each module, written
    if `observer` is 0; `names` are the indices of the output's and gradient's names.
    """

    def add(value: Tensor) -> Tensor:
        dtype = value.real.dtype if value.is_complex() else value.dtype
        if dtype not in DTYPES or not value.numel():
            return value
        _write(flags[0], index, value.detach(), observer, names[0])
        if not value.requires_grad:
            return value
        result: Tensor = ObserveGrad.apply(value, flags[1], index, observer, names[1])  # type: ignore[no-untyped-call]
        return result

    return pytree.tree_map_only(Tensor, add, output)

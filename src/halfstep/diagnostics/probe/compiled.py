"""What a probe does inside a graph of torch.compile.

In: a module's output, while it is traced. Out: the same output, and operations in the
graph, forward and backward, that write flags or, at run time, show the tensor to the
probe.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.numerics.tensor_counts import DTYPES

UNSEEN = -1.0
"""What a flag holds until something was written to it: 0, or 1 for inf or NaN."""


class Watching(Protocol):
    """An observer that graphs report tensors to at run time."""

    def at_run_time(self, name: int, value: Tensor) -> None:
        """Be shown the tensor of a name by its number."""


if TYPE_CHECKING:
    _watching: weakref.WeakValueDictionary[int, Watching]
_watching = weakref.WeakValueDictionary()


def register(watching: Watching) -> int:
    """Return the number of an observer in graphs, valid as long as it lives."""
    _watching[id(watching)] = watching
    return id(watching)


@torch.library.custom_op("halfstep::observe", mutates_args=("flags",))
def observe(flags: Tensor, value: Tensor, who: int, name: int) -> None:  # noqa: ARG001
    """Show a tensor to a probe at run time; what it writes to `flags` keeps it there.

    Why: a graph has no place for statistics that are taken in some steps only, and
    would be compiled anew for each kind of step.
    """
    watching = _watching.get(who)
    if watching is not None:
        watching.at_run_time(name, value)


@observe.register_fake
def _observe_fake(flags: Tensor, value: Tensor, who: int, name: int) -> None:
    """Do nothing to fake tensors."""


def _write(flags: Tensor, place: int, value: Tensor, who: int, name: int) -> None:
    """Note in a graph whether a tensor is finite, or show it, where `who` is given."""
    if who:
        observe(flags, value, who, name)
        return
    real = torch.view_as_real(value) if value.is_complex() else value
    bad = torch.isfinite(real).logical_not().any().to(flags.dtype)
    flags[place].copy_(torch.maximum(flags[place], bad))


class Watch(torch.autograd.Function):
    """A tensor as it is, whose gradient is looked at on its way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's own
        value: Tensor,
        flags: Tensor,
        place: int,
        who: int,
        name: int,
    ) -> Tensor:
        """Return the tensor."""
        ctx.flags, ctx.target = flags, (place, who, name)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Look at the gradient; return it."""
        place, who, name = ctx.target
        (gradient,) = gradients
        _write(ctx.flags, place, gradient.detach(), who, name)
        return gradient, None, None, None, None


def watched(
    output: Any,  # noqa: ANN401 -- whatever a module returns
    flags: tuple[Tensor, Tensor],
    place: int,
    who: int,
    names: tuple[int, int],
) -> Any:  # noqa: ANN401
    """Return a module's output, watched; traced into a graph.

    Args:
        output: Any value that torch's pytree knows.
        flags: Of outputs and of gradients, float32, a number for each module.
        place: Of the module in them.
        who: Number of the registered observer; 0 writes flags instead.
        names: Numbers of the names of its output and its gradient.
    """

    def look(value: Tensor) -> Tensor:
        kind = value.real.dtype if value.is_complex() else value.dtype
        if kind not in DTYPES or not value.numel():
            return value
        _write(flags[0], place, value.detach(), who, names[0])
        if not value.requires_grad:
            return value
        seen: Tensor = Watch.apply(value, flags[1], place, who, names[1])  # type: ignore[no-untyped-call]
        return seen

    return pytree.tree_map_only(Tensor, look, output)

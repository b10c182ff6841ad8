"""What a replay is asked to run: refused in words where it cannot be.

In: a model, and what should compute losses. Out: a list of callables, or a `UserError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from halfstep.errors import UserError, require

Step = Callable[[], Tensor]
"""Computes the loss of one micro-batch."""

_EXAMPLE = "such as lambda: loss_fn(model(x), y)"


def steps(model: object, step: Step | Sequence[Step]) -> list[Step]:
    """Return one callable for each micro-batch.

    Raises:
        UserError: If there is none, or one cannot be called, or `model` is no module.
    """
    if not isinstance(model, nn.Module):
        message = (
            f"model={_repr(model)} of find_nonfinite is not a torch module: "
            "give the "
            "nn.Module whose forward pass step() runs."
        )
        raise UserError(message)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            message = (
                f"{name!r} of the model of find_nonfinite has no shape yet, "
                "for its module "
                "is lazy and has not run: run the model once before."
            )
            raise UserError(message)
    several = isinstance(step, Sequence) and not isinstance(step, str)
    given: list[object] = [*step] if several else [step]  # type: ignore[misc]
    for one in given or [step]:
        if not callable(one):
            message = (
                f"step={_repr(one)} of find_nonfinite cannot be called: "
                "give a function "
                f"that computes the loss, {_EXAMPLE}, or a list with one for each "
                "micro-batch."
            )
            raise UserError(message)
    return given  # type: ignore[return-value]


def check_numbers(scale: object, summed_in: object) -> None:
    """Refuse what would hide a fault, or make one of its own.

    Raises:
        UserError: If the scale is none, or the format holds no fractions.
    """
    good = isinstance(scale, int | float) and 0 < scale < math.inf
    require("scale", scale, good, "a finite number above 0")
    dtype = isinstance(summed_in, torch.dtype) and summed_in.is_floating_point
    right = "a floating dtype, such as torch.float32, or None"
    require("summed_in", summed_in, summed_in is None or dtype, right)


def check_loss(step: Step, loss: object) -> None:
    """Refuse what is no loss.

    Raises:
        UserError: If it is not one floating number, as a tensor.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return
    message = (
        f"step {_name(step)!r} of find_nonfinite returned {_repr(loss)}: "
        "it must return "
        f"the loss, a floating tensor of one number, {_EXAMPLE}."
    )
    raise UserError(message)


def check_graph(step: Step, loss: Tensor, learning: Sequence[Tensor]) -> None:
    """Refuse a finite loss whose gradients cannot be checked.

    Args:
        step: Which computed it.
        loss: By it.
        learning: What should have gradients.

    Raises:
        UserError: If something learns, and the loss has no graph.
    """
    if loss.requires_grad or not learning:
        return
    message = (
        f"step {_name(step)!r} of find_nonfinite returned a finite loss "
        "without a graph, so "
        "no gradient can be looked at: compute it without torch.no_grad and detach."
    )
    raise UserError(message)


def _name(step: Step) -> str:
    """Return what a callable is called."""
    return getattr(step, "__qualname__", None) or type(step).__name__


def _repr(value: object) -> str:
    """Return a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:40]
    if isinstance(value, list | tuple) and not value:
        return repr(value)
    return f"a {type(value).__name__}"

"""What a check before training cannot be made of, and what to say of it.

In: a model, a batch, a loss. Out: nothing, or one sentence in a `UserError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import UserError
from halfstep.formats import is_low, tensors_in
from halfstep.preflight.counts import is_leaf
from halfstep.scaler.measured import nodes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def check_loss(loss: object, others: frozenset[int]) -> None:
    """Refuse what cannot be trained with, and losses of another model.

    Args:
        loss: What a loss function returned.
        others: Ids of parameters that it may not depend on.

    Raises:
        UserError: If it will not do.
    """
    if not isinstance(loss, Tensor):
        message = (
            f"loss_fn returned a value of type {type(loss).__name__}: return the loss, "
            "a tensor of shape ()."
        )
        raise UserError(message)
    if loss.shape:
        message = (
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}: return one "
            "number, such as its mean()."
        )
        raise UserError(message)
    if not loss.is_floating_point() or loss.grad_fn is None:
        message = (
            f"loss_fn returned a {loss.dtype} without a graph: no gradient would flow; "
            "compute it from the model's output, without detach(), item() or no_grad()."
        )
        raise UserError(message)
    leaves = {id(node.variable) for node in nodes_of(loss.grad_fn) if is_leaf(node)}  # type: ignore[attr-defined]
    if leaves & others:
        message = (
            "loss_fn uses the model that was given to check, not the copy it is called "
            "with: write loss_fn(model, batch) with its own argument."
        )
        raise UserError(message)


def check_gradients(gradients: Mapping[str, Tensor]) -> None:
    """Refuse a loss that reached no parameter.

    Raises:
        UserError: If there is none.
    """
    if not gradients:
        message = (
            "no gradient reaches any parameter of the model: loss_fn(model, batch) "
            "must make its loss from what the model it is given returns."
        )
        raise UserError(message)


def check_arguments(
    model: object, loss_fn: object, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse no model, a loss that takes none, and another model's optimizer.

    Raises:
        UserError: If one of them is given.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        message = f"check(model=...) got a {kind}: give a torch.nn.Module."
        raise UserError(message)
    if isinstance(loss_fn, nn.modules.loss._Loss):  # noqa: SLF001
        kind = type(loss_fn).__name__
        message = (
            f"loss_fn={kind}() takes no model: give a function loss_fn(model, batch) "
            f"that calls the model on the batch and returns the loss {kind}() gives."
        )
        raise UserError(message)
    if optimizer is not None:
        own = {id(param) for param in model.parameters()}
        groups = optimizer.param_groups
        if not any(id(param) in own for group in groups for param in group["params"]):
            message = (
                f"optimizer={type(optimizer).__name__} holds no parameter of the model "
                "that is checked: make it over model.parameters()."
            )
            raise UserError(message)


def check_model(model: nn.Module) -> None:
    """Refuse models that no fp32 reference can be made of.

    Raises:
        UserError: If it is wrapped, learns nothing, or is stored in 16 bits.
    """
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        message = f"check(model=...) got a {kind}: give the bare model, model.module."
        raise UserError(message)
    if not any(param.requires_grad for param in model.parameters()):
        message = f"{kind} has no parameter that learns: there is nothing to check."
        raise UserError(message)
    for name, param in model.named_parameters():
        lazy = is_lazy(param)
        if lazy:
            message = f"parameter {name!r} has no shape yet: call the model once first."
            raise UserError(message)
        if is_low(param.dtype):
            message = (
                f"parameter {name!r} is stored in {param.dtype}: check compares with "
                "fp32, and needs the fp32 weights; load the model in fp32."
            )
            raise UserError(message)
        if param.is_meta or hasattr(param, "to_local"):
            state = "on the meta device" if param.is_meta else "sharded"
            message = f"parameter {name!r} is {state}: check needs a whole model."
            raise UserError(message)


def misplaced(model: nn.Module, batch: object) -> str:
    """Return what to say where a batch lies on another device than the model, or ""."""
    home = next(model.parameters()).device
    for tensor in tensors_in(batch):
        if tensor.device != home:
            return (
                f"the batch holds a tensor on {tensor.device}, the model is on {home}: "
                f"move it, as in batch.to({str(home)!r})."
            )
    return ""

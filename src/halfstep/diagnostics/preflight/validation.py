"""Validates the arguments of `halfstep.check`, and the losses and gradients.

Each `check_*` raises `UserError` for what is invalid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.diagnostics.replay.search import check_model
from halfstep.errors import UserError, require
from halfstep.machine.recommendation import Choice
from halfstep.masters import encoding as forms
from halfstep.nonfinite.graph import nodes_of
from halfstep.numerics.formats import is_low, tensors_in
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.autograd.graph import Node

_MOST = {"margin": 40, "steps": 10**6}  # fp16 has 40 powers of two in all
_WORDS = 15  # of an error message
_RIGHT = {
    "margin": "0 or more powers of two, 40 at most",
    "steps": "0 or more steps to time, a whole number",
}


def check_own_model(loss: Tensor, others: frozenset[int]) -> None:
    """Check that a loss depends on the copy of a model, and on no parameter of it."""
    nodes: set[Any] = nodes_of(loss.grad_fn)
    if {id(node.variable) for node in nodes if is_leaf(node)} & others:
        raise UserError(
            "loss_fn uses the model that was given to check, not the copy it is called "
            "with: write loss_fn(model, batch) with its own argument."
        )


def is_leaf(node: Node) -> bool:
    """Return whether a node accumulates a gradient into a leaf, such as a weight."""
    return type(node).__name__ == "AccumulateGrad"


def check_gradients(gradients: Mapping[str, Tensor]) -> None:
    """Check that a parameter has a gradient."""
    if not gradients:
        raise UserError(
            "no gradient reaches any parameter of the model: loss_fn(model, batch) "
            "must make its loss from what the model it is given returns."
        )


def check_words(
    level: object, dtype: object, policy: object, master: object, **counts: object
) -> None:
    """Check the types of `level` etc., and the ranges of `margin` and `steps`."""
    kinds = (
        ("level", level, str | Choice, "'O0', 'O1', 'O2', 'O3', 'auto' or a Choice"),
        ("dtype", dtype, str | torch.dtype, "'bf16', 'fp16', 'auto' or a torch.dtype"),
        (
            *("policy", policy, str | Policy | None),
            "'lean', 'torch', either with rules, or a Policy",
        ),
        ("master", master, str, "the name of a form of master weights"),
    )
    for name, value, kind, expected in kinds:
        require(name, value, isinstance(value, kind), expected)
    forms.parse(str(master))
    for name, value in counts.items():
        is_int = isinstance(value, int) and not isinstance(value, bool)
        good = is_int and 0 <= value <= _MOST[name]  # type: ignore[operator]
        require(name, value, good, _RIGHT[name])


def check_arguments(
    model: nn.Module,
    loss_fn: object,
    optimizer: torch.optim.Optimizer | None,
    more: object,
) -> None:
    """Check the types of model and `loss_fn`, and the optimizer's parameters."""
    check_model(model)
    if isinstance(loss_fn, nn.modules.loss._Loss):  # noqa: SLF001
        kind = type(loss_fn).__name__
        raise UserError(
            f"loss_fn={kind}() takes no model: give a function loss_fn(model, batch) "
            f"that calls the model on the batch and returns the loss {kind}() gives."
        )
    takes = callable(loss_fn) and not isinstance(loss_fn, type)
    require("loss_fn", loss_fn, takes, "a function loss_fn(model, batch) of the loss")
    require("more", more, isinstance(more, list | tuple), "a list of batches")
    if optimizer is not None:
        theirs = isinstance(optimizer, torch.optim.Optimizer)
        right = "a torch.optim.Optimizer over the model's parameters, or None"
        require("optimizer", optimizer, theirs, right)
        own = {id(param) for param in model.parameters()}
        groups = optimizer.param_groups
        if not any(id(param) in own for group in groups for param in group["params"]):
            raise UserError(
                f"optimizer={type(optimizer).__name__} holds no parameter of the model "
                "that is checked: make it over model.parameters()."
            )


def check_fp32(model: nn.Module) -> None:
    """Check that an fp32 reference can be computed from the model."""
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UserError(
            f"check(model=...) got a {kind}: give the bare model, model.module."
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError(
            f"{kind} has no parameter that learns: there is nothing to check."
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.Parameter) and is_low(tensor.dtype):
            raise UserError(
                f"parameter {name!r} is stored in {tensor.dtype}: check compares with "
                "fp32, and needs the fp32 weights; load the model in fp32."
            )
        if tensor.is_meta or hasattr(tensor, "to_local"):
            state = "on the meta device" if tensor.is_meta else "sharded"
            raise UserError(f"{name!r} is {state}: check needs a whole model.")


def raised(what: str, error: Exception, advice: str) -> UserError:
    """Return a `UserError` for an error that a call raised in fp32."""
    words = " ".join(str(error).split()[:_WORDS]) or "without a word"
    message = f"{what} raised {type(error).__name__} in fp32: {words}. {advice}"
    return UserError(message)


def empty(batch: object) -> str:
    """Return a note on a batch without examples, or ""."""
    shapes = [tuple(one.shape) for one in tensors_in(batch) if one.ndim]
    none = next((shape for shape in shapes if not shape[0]), None)
    return "" if none is None else f"the batch holds a tensor of shape {none}"


def misplaced(model: nn.Module, batch: object) -> str:
    """Return an error message if batch and model are on different devices, or ""."""
    home = next(model.parameters()).device
    for tensor in tensors_in(batch):
        if tensor.device != home:
            return (
                f"the batch holds a tensor on {tensor.device}, the model is on {home}: "
                f"move it, as in batch.to({str(home)!r})."
            )
    return ""

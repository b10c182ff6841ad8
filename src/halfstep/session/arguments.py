"""Checks the arguments of `prepare` before anything is changed."""

from __future__ import annotations

import inspect
import weakref
from difflib import SequenceMatcher
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from halfstep.casting.convert_model import called_modules
from halfstep.errors import UserError, format_value, require, require_type
from halfstep.numerics import formats
from halfstep.session.chained_optimizer import ChainedOptimizer, optimizers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.machine.recommendation import Choice

_prepared: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
"""Model or optimizer -> level and dtype that it was prepared at."""


def check_unknown(unknown: Iterable[str], function: Callable[..., object]) -> None:
    """Raise if there are keyword arguments that a function does not have."""
    for name in unknown:
        *names, _ = inspect.signature(function).parameters
        similarity, nearest = max((_similarity(name, each), each) for each in names)
        if name.endswith("scaler"):  # it resembles `scheduler`
            similarity, nearest = 1.0, "loss_scale"
        answer = f"choose from {', '.join(names)}."
        if similarity > 0.6:  # noqa: PLR2004 -- unrelated names reach 0.55
            answer = f"did you mean {nearest}?"
        raise UserError(f"{function.__name__}() has no argument {name!r}: {answer}")


def _similarity(name: str, other: str) -> float:
    """Return how well the words of `name`, in any order, cover those of `other`."""

    def best(word: str) -> float:
        pairs = (SequenceMatcher(None, word, each) for each in name.split("_"))
        return max(pair.ratio() for pair in pairs)

    return fmean(map(best, other.split("_")))


def as_one(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return lists of models as one module, and of optimizers as one optimizer."""
    if isinstance(model, list | tuple):
        are_models = bool(model) and all(isinstance(m, nn.Module) for m in model)
        require_type("model", model, are_models, "an nn.Module, or a list of them")
        model = nn.ModuleList(model)
    if isinstance(optimizer, list | tuple):
        expected = "a torch.optim.Optimizer, or a list of them"
        require_type("optimizer", optimizer, bool(optimizer), expected)
        for each in optimizer:
            _check_optimizer(each)
        optimizer = ChainedOptimizer(optimizer)
    # `check_model_and_optimizer` rejects other types.
    return cast("nn.Module", model), cast("torch.optim.Optimizer", optimizer)


def check_model_and_optimizer(model: object, optimizer: object) -> None:
    """Raise unless the arguments are a model and its optimizer."""
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise UserError(
            "prepare was given the optimizer first: write prepare(model, optimizer)."
        )
    require_type("model", model, isinstance(model, nn.Module), "an nn.Module")
    assert isinstance(model, nn.Module)  # noqa: S101
    _check_optimizer(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)  # noqa: S101
    _check_not_prepared(model, optimizer)
    own = {id(param) for param in model.parameters()}
    groups = optimizer.param_groups
    # For sharded parameters, `session.fsdp` has a better message.
    sharded = any(hasattr(param, "device_mesh") for param in model.parameters())
    holds = any(id(param) in own for group in groups for param in group["params"])
    if not holds and not sharded:
        raise UserError(
            f"the {type(optimizer).__name__} holds none of the model's parameters: "
            "make it over model.parameters(), after the model has been built and moved."
        )


def _check_optimizer(optimizer: object) -> None:
    type_name = type(optimizer).__name__
    is_class = isinstance(optimizer, type)
    inner = None if is_class else getattr(optimizer, "optimizer", None)
    # A wrapper may inherit from Optimizer without calling its `__init__`.
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer) and hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    )
    if isinstance(optimizer, LRScheduler):
        raise UserError(
            f"the optimizer given is a scheduler, {type_name}: write "
            "prepare(model, optimizer, scheduler=scheduler)."
        )
    if not is_optimizer and isinstance(inner, torch.optim.Optimizer):
        raise UserError(
            f"optimizer is of type {type_name}, around {type(inner).__name__}: a "
            "session scales and steps by itself, so give prepare what is inside, "
            "optimizer.optimizer."
        )
    require_type("optimizer", optimizer, is_optimizer, "a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        message = "LBFGS evaluates the model inside its step; use another optimizer."
        raise UserError(message)


def _check_not_prepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if prepared before: hooks and master weights would exist twice."""
    parts = optimizers_of(optimizer)
    prepared_at = next((_prepared[each] for each in parts if each in _prepared), None)
    what = "the optimizer"
    for path, module in model.named_modules():
        if prepared_at is None and module in _prepared:
            prepared_at = _prepared[module]
            what = f"module {path!r}" if path else "the model"
    if prepared_at is not None:
        raise UserError(
            f"{what} was prepared before, at {prepared_at}: go on with that session, "
            "or build model and optimizer anew and load session.weights() into the "
            "model."
        )


def mark_prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, choice: Choice
) -> None:
    """Record that models and optimizers were prepared."""
    for each in (*called_modules(model), *optimizers_of(optimizer)):
        _prepared[each] = str(choice)
    for module in model.modules() if choice.level.low_weights else ():
        # Modules without trainable weights may be shared between models.
        if any(param.requires_grad for param in module.parameters(recurse=False)):
            _prepared[module] = str(choice)


def check_fp32_weights(model: nn.Module, choice: Choice) -> None:
    """Raise if trainable weights are 16-bit and the level requires fp32.

    Frozen ones may be 16-bit: an fp32 adapter on a bf16 model.
    """
    if choice.level.low_weights:
        return
    for name, param in model.named_parameters():
        if param.requires_grad and formats.is_low(param.dtype):
            raise UserError(
                f"level={choice.level} trains fp32 weights, and {name!r} is "
                f"{formats.word(param.dtype)}: call model.float() before you make the "
                "optimizer, freeze it, or choose O2, which keeps fp32 master weights."
            )


def check_named_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None, model: nn.Module
) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) pairs for reports."""
    expected = "pairs of name and parameter, as model.named_parameters() gives them"
    if named_parameters is None:
        return list(model.named_parameters())
    is_valid = hasattr(named_parameters, "__iter__") and not isinstance(
        named_parameters, str | torch.Tensor
    )
    require_type("named_parameters", named_parameters, is_valid, expected)
    pairs: list[Any] = list(named_parameters)
    for pair in pairs:
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2  # noqa: PLR2004
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise UserError(
                f"named_parameters holds {format_value(pair)}; it must be {expected}."
            )
    return pairs


def check_group(group: object) -> None:
    """Raise unless the argument is a process group or None."""
    group_type = getattr(torch.distributed, "ProcessGroup", ())  # not in every build
    is_valid = group is None or isinstance(group, group_type)
    require(
        "process_group", group, is_valid, "a torch.distributed.ProcessGroup, or None"
    )

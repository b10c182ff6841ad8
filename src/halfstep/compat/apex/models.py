"""Checks models, casts their weights, and hooks casts of their inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.compat.apex import masters
from halfstep.compat.apex.fp16_utils import convert_network
from halfstep.compat.apex.state import AmpError, reject
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_unwrapped(models: Sequence[nn.Module]) -> None:
    """Refuse models in a parallel wrapper, whose buckets have the dtype that it saw.

    Raises:
        AmpError: If one is.
    """
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            message = (
                f"the model is already in {type(model).__name__}: pass the bare model "
                "to amp.initialize, and wrap what it returns."
            )
            raise AmpError(message)


def check_fp32(models: Sequence[nn.Module]) -> None:
    """Refuse models that are 16 bits already.

    Raises:
        AmpError: If one is, unless `hard_override` is set.
    """
    for model in models:
        parameters = [("param", *pair) for pair in model.named_parameters()]
        buffers = [("buffer", *pair) for pair in model.named_buffers()]
        for kind, name, tensor in parameters + buffers:
            if is_low(tensor.dtype):
                message = (
                    f"found {kind} {name} with dtype {tensor.dtype}, expected "
                    "torch.float32: do not call .half() on a model before "
                    "amp.initialize, at any opt_level."
                )
                reject(message)


def cast_(
    model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool
) -> dict[nn.Parameter, Tensor]:
    """Store a model's weights in a dtype, in place, and let its checkpoints be fp32.

    Args:
        model: Bare.
        dtype: Of weights, buffers and floating inputs.
        keep_batchnorm: Leave batch norm in fp32.

    Returns:
        Parameter that is now 16 bits -> its fp32 value before.
    """
    # `.detach()` would share the version counter: autograd would take a write into the
    # master for one into the weight.
    before = {param: param.data for param in model.parameters()}
    if keep_batchnorm:
        convert_network(model, dtype)
    else:
        model.to(dtype)
    model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    masters.attach(model)
    return {
        param: value
        for param, value in before.items()
        if is_low(param.dtype) and value.dtype == torch.float32
    }


def cast_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model's floating outputs be of a dtype."""
    model.register_forward_hook(partial(_cast_output, dtype))


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401
    return cast_nested(args, dtype), cast_nested(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: object, output: object) -> Any:  # noqa: ANN401
    return cast_nested(output, dtype)


def cast_nested(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return a value with its floating tensors in a dtype, fp64 too, as apex has it.

    A batch class of the user's own is asked to cast itself, by its method `to`.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, MutableMapping):
        cast_copy = copy.copy(value)
        for key, item in value.items():
            cast_copy[key] = cast_nested(item, dtype)
        return cast_copy
    if isinstance(value, list | tuple):
        items = [cast_nested(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "to") and not isinstance(value, nn.Module | type):
        return value.to(dtype)
    return value

"""Checks models, casts their weights, and adds hooks that cast inputs and outputs."""

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
    """Reject models in a parallel wrapper, whose buckets have the dtype at wrapping.

    Raises:
        AmpError: If one is wrapped.
    """
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            message = (
                f"the model is already in {type(model).__name__}: pass the bare model "
                "to amp.initialize, and wrap what it returns."
            )
            raise AmpError(message)


def check_fp32(models: Sequence[nn.Module]) -> None:
    """Reject models with 16-bit parameters or buffers.

    Raises:
        AmpError: If there are any, unless `hard_override` is set.
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
    """Cast a model's weights in place; its checkpoints stay fp32.

    Args:
        model: The model, unwrapped.
        dtype: Dtype of weights, buffers and floating inputs.
        keep_batchnorm: Leave batch norm in fp32.

    Returns:
        Parameter that is now 16-bit -> its fp32 value before.
    """
    # `.detach()` would share the version counter, so that for autograd a write to the
    # master weight would look like one to the weight.
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
    """Cast a model's floating outputs to a dtype, by a forward hook."""
    model.register_forward_hook(partial(_cast_output, dtype))


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401
    return cast_nested(args, dtype), cast_nested(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: object, output: object) -> Any:  # noqa: ANN401
    return cast_nested(output, dtype)


def cast_nested(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Cast the floating tensors in a nested value, fp64 too, as apex does.

    Other objects with a method `to`, such as batch classes, are cast by it.
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

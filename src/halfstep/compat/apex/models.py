"""Checks and casts models; their checkpoints stay fp32, with values of master weights.

Hooks cast inputs and outputs. Master weights follow values that are loaded or written
into a model.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.compat.apex.state import AmpError
from halfstep.numerics.formats import is_low, map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence


def check(models: Sequence[nn.Module], *, fp32: bool) -> None:
    """Reject models in a parallel wrapper, whose buckets have the dtype at wrapping."""
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise AmpError(
                f"the model is already in {type(model).__name__}: pass the bare model "
                "to amp.initialize, and wrap what it returns."
            )
    for model in models if fp32 else ():
        parameters = [("param", *pair) for pair in model.named_parameters()]
        buffers = [("buffer", *pair) for pair in model.named_buffers()]
        for kind, name, tensor in parameters + buffers:
            if is_low(tensor.dtype):
                raise AmpError(
                    f"found {kind} {name} with dtype {tensor.dtype}, expected "
                    "torch.float32: do not call .half() on a model before "
                    "amp.initialize, at any opt_level."
                )


def cast_(
    model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool
) -> dict[nn.Parameter, Tensor]:
    """Cast a model's weights, buffers and inputs; its checkpoints stay fp32.

    Returns the fp32 value of each parameter that is 16-bit now.
    """
    # `.detach()` would share the version counter, so that for autograd a write to the
    # master weight would look like one to the weight.
    before = {param: param.data for param in model.parameters()}
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.affine]
    fp32_norms = [(m, m.state_dict()) for m in norms if keep_batchnorm]
    model.to(dtype)
    for norm, values in fp32_norms:
        norm.float().load_state_dict(values)
    model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    keep_fp32_state(model)
    return {
        param: value
        for param, value in before.items()
        if is_low(param.dtype) and value.dtype == torch.float32
    }


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return cast_nested(args, dtype), cast_nested(kwargs, dtype)


def cast_output(dtype: torch.dtype, _: nn.Module, __: object, output: object) -> Any:
    """Cast a model's floating outputs to a dtype (forward hook)."""
    return cast_nested(output, dtype)


def cast_nested(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in a nested value, fp64 too, as apex does."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


# Master weights


_MASTERS: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
_VERSIONS: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
"""Version counter of a parameter when it and its master weight last agreed; after a
load there is none, and values are compared instead."""


def record(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Record the master weight of each parameter; call it when both agree."""
    for param, master in pairs:
        _MASTERS[param], _VERSIONS[param] = master, param._version  # noqa: SLF001


@torch.no_grad()
def sync_from_params(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the master weights what was written into the parameters since `record`.

    Weights are initialised, loaded and broadcast (by DDP's constructor) between
    `initialize` and the first backward pass. A changed version counts even if values
    are equal, as on the rank that DDP broadcasts from: its master weights must be
    rounded like those of other ranks.
    """
    for param, master in pairs:
        version = param._version  # noqa: SLF001
        is_written = _VERSIONS.get(param, version) != version
        if is_written or not torch.equal(param, master.to(param.dtype)):
            master.copy_(param)


def keep_fp32_state(model: nn.Module) -> None:
    """Register hooks that make `state_dict` and `load_state_dict` of a model fp32."""
    for module in model.modules():
        module.register_state_dict_post_hook(_fp32_state_dict_hook)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_load_fp32_hook)  # type: ignore[no-untyped-call]


def _fp32_state_dict_hook(
    module: nn.Module, state: dict[str, Any], prefix: str, _: object
) -> None:
    """Replace 16-bit tensors by fp32 copies, as apex does."""
    for name, tensor in _own_tensors(module):
        key = prefix + name
        if key in state and is_low(tensor.dtype):
            value = _MASTERS.get(tensor, tensor)
            state[key] = value.detach().to(torch.float32, copy=True)


@torch.no_grad()
def _load_fp32_hook(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Load the master weights before the values are rounded into the parameters."""
    for name, tensor in _own_tensors(module):
        value, master = state.get(prefix + name), _MASTERS.get(tensor)
        if master is not None and isinstance(value, Tensor):
            if value.shape == master.shape:
                master.copy_(value)
            _VERSIONS.pop(tensor, None)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's own parameters and buffers, without those of submodules."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]

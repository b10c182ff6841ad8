"""Maps 16-bit parameters to fp32 master weights, for checkpoints and writes.

The `state_dict` of a model is then in fp32, with the values of master weights, and
master weights follow values that are loaded or written into the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping


@dataclass
class _Master:
    """A parameter's master weight, and the state of the parameter at the last sync."""

    tensor: Tensor
    version: int | None
    """Version counter of the parameter when both last agreed; None, as after a load:
    compare values instead."""


_MASTERS: MutableMapping[Tensor, _Master] = WeakIdKeyDictionary()


def record(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Record the master weight of each parameter; call it when both agree."""
    for param, master in pairs:
        _MASTERS[param] = _Master(master, param._version)  # noqa: SLF001


@torch.no_grad()
def sync_from_params(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the master weights what was written into the parameters since `record`.

    Weights are initialised, loaded and broadcast (by DDP's constructor) between
    `initialize` and the first backward pass. A changed version counts even if values
    are equal, as on the rank that DDP broadcasts from: its master weights must be
    rounded like those of other ranks.
    """
    for param, master in pairs:
        entry = _MASTERS.get(param)
        version = None if entry is None else entry.version
        is_written = version not in {None, param._version}  # noqa: SLF001
        if is_written or not torch.equal(param, master.to(param.dtype)):
            master.copy_(param)


def attach(model: nn.Module) -> None:
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
            entry = _MASTERS.get(tensor)
            value = tensor if entry is None else entry.tensor
            state[key] = value.detach().to(torch.float32, copy=True)


@torch.no_grad()
def _load_fp32_hook(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Load the master weights before the values are rounded into the parameters."""
    for name, tensor in _own_tensors(module):
        value, entry = state.get(prefix + name), _MASTERS.get(tensor)
        if entry is not None and isinstance(value, Tensor):
            if value.shape == entry.tensor.shape:
                entry.tensor.copy_(value)
            entry.version = None


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's own parameters and buffers, without those of submodules."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]

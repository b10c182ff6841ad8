"""The fp32 master of each 16-bit parameter, for checkpoints and edits.

In: parameters and masters. Out: `state_dict` of a model in fp32, masters where there
are any; and masters that follow what is loaded or written into the model.
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
    """A parameter's master, and whether the parameter was written to since."""

    tensor: Tensor
    version: int | None
    """Of the parameter when master and parameter last agreed; None: only the numbers
    tell, as after a load."""


_MASTERS: MutableMapping[Tensor, _Master] = WeakIdKeyDictionary()


def record(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Remember masters by parameter; call it when both agree."""
    for param, master in pairs:
        _MASTERS[param] = _Master(master, param._version)  # noqa: SLF001


@torch.no_grad()
def sync_from_params(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Take into the masters what was written into the parameters since `note`.

    Why: weights are initialised, loaded and broadcast (by DDP's constructor) between
    `initialize` and the first backward pass. A version that changed counts even where
    the numbers did not: on the rank that DDP broadcasts from they never do, and its
    masters must not stay more exact than those of the others.
    """
    for param, master in pairs:
        entry = _MASTERS.get(param)
        version = None if entry is None else entry.version
        is_written = version not in {None, param._version}  # noqa: SLF001
        if is_written or not torch.equal(param, master.to(param.dtype)):
            master.copy_(param)


def attach(model: nn.Module) -> None:
    """Let a model's checkpoints, and those of its parts, be fp32, both ways."""
    for module in model.modules():
        module.register_state_dict_post_hook(_fp32_state_dict_hook)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_load_fp32_hook)  # type: ignore[no-untyped-call]


def _fp32_state_dict_hook(
    module: nn.Module, state: dict[str, Any], prefix: str, _: object
) -> None:
    """Put fp32 numbers in place of 16-bit ones, copies as apex's are."""
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
    """Load masters from what is about to be rounded into the parameters."""
    for name, tensor in _own_tensors(module):
        value, entry = state.get(prefix + name), _MASTERS.get(tensor)
        if entry is not None and isinstance(value, Tensor):
            if value.shape == entry.tensor.shape:
                entry.tensor.copy_(value)
            entry.version = None


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's own parameters and buffers, not those of modules inside."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]

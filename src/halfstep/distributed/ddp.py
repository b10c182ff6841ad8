"""Wraps models in DistributedDataParallel, unwraps them, and bypasses DDP."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.distributed.process_group import World


_BYPASSED = "_halfstep_bypassed"


def data_parallel(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model so that its gradients are averaged over all processes."""
    if world.size == 1:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def _uncompiled(model: nn.Module) -> object:
    """Return what torch.compile's wrapper holds; None for other modules."""
    # Not `getattr`: wrappers may forward it. A scripted model's modules are no dict.
    return dict(vars(model).get("_modules", {}).items()).get("_orig_mod")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel or torch.compile's wrapper."""
    while True:
        inner = _uncompiled(model)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def is_data_parallel(model: nn.Module) -> bool:
    """Return whether gradients are averaged in each backward pass."""
    return find_ddp(model) is not None


@contextlib.contextmanager
def bypassed(model: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Make a DDP model run its module without any communication.

    Why not `no_sync`: the forward pass after the first backward pass rebuilds the
    buckets, which all ranks must do together.
    """
    attributes = vars(model)
    before = attributes.get("forward")
    attributes["forward"] = partial(_forward_module, model)
    attributes[_BYPASSED] = True
    try:
        with model.no_sync():
            yield
    finally:
        del attributes["forward"], attributes[_BYPASSED]
        if before is not None:
            attributes["forward"] = before


def is_bypassed(model: nn.Module) -> bool:
    """Return whether a module is a DDP model that is bypassed now."""
    return _BYPASSED in vars(model)


def _forward_module(
    model: nn.parallel.DistributedDataParallel, *args: object, **kwargs: object
) -> object:
    """Run a DDP model's module, with inputs moved and cast as DDP does."""
    device = None
    if model.device_ids:
        device = torch.device(model.device_type, model.device_ids[0])
    mixed = getattr(model, "mixed_precision", None)
    dtype = None if mixed is None else mixed.param_dtype

    def ready(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    args, kwargs = _pytree.tree_map(ready, (args, kwargs))
    return model.module(*args, **kwargs)


def find_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP module that a model is, or that torch.compile wraps; else None."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = _uncompiled(model)
        if not isinstance(inner, nn.Module) or inner is model:
            return None
        model = inner
    return None if is_bypassed(model) else model

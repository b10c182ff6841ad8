"""Many processes: torchrun's environment, data parallelism, and agreement.

In: the environment that torchrun sets. Out: a `World`, a model wrapped in DDP, sums
and maxima over ranks. With one process every function is the identity.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all that train together."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """The one process that writes files and speaks."""
        return self.rank == 0


@contextlib.contextmanager
def join(device: str) -> Iterator[World]:
    """Join the processes that torchrun started; leave them, all at once, at the end.

    Args:
        device: "cpu" (gloo) or "cuda" (nccl; each process takes the GPU of its local
            rank).
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device(device, local) if device == "cuda" else torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(0, 1, where)
        return
    try:
        dist.init_process_group(
            "nccl" if where.type == "cuda" else "gloo",
            device_id=where if where.type == "cuda" else None,
        )
    except ValueError as error:
        message = f"RANK is set, but the environment is not torchrun's: {error}."
        raise UserError(message) from error
    try:
        yield World(dist.get_rank(), dist.get_world_size(), where)
        # A thread of gloo's that still holds the last collective's tensors asks for
        # the GIL to let them go. While the interpreter ends, that aborts the process;
        # while DDP is freed, it is a deadlock. So all come to an end, and a moment's
        # sleep hands out the GIL. Not after an error: others may never come.
        dist.barrier()
        time.sleep(0.05)
    finally:
        dist.destroy_process_group()


def data_parallel(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model so that its gradients are averaged over all processes."""
    if world.size == 1:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel or torch.compile's wrapper."""
    while True:
        inner = model.__dict__.get("_modules", {}).get("_orig_mod")
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def is_data_parallel(model: nn.Module) -> bool:
    """Say whether gradients are averaged in each backward pass."""
    return wrapper(model) is not None


def unsynchronised(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a region in which a DDP model keeps its gradients to itself."""
    found = wrapper(model)
    if found is not None:
        return found.no_sync()
    return contextlib.nullcontext()


def wrapper(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP that a model is, or that torch.compile has wrapped; else None."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.__dict__.get("_modules", {}).get("_orig_mod")
        if not isinstance(inner, nn.Module) or inner is model:
            return None
        model = inner
    return model


def highest(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the elementwise maximum over all processes, the same on each."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def total(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the elementwise sum over all processes, the same on each."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.SUM, group=group)
    return value


def same_everywhere(value: T) -> T:
    """Return the first process's value, on each."""
    box: list[T] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def wait_for_all() -> None:
    """Return when every process has come this far."""
    if dist.is_initialized():
        dist.barrier()

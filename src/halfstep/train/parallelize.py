"""Applies DDP, FSDP2, torch.compile and activation checkpointing to a model."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from torch import nn

from halfstep.errors import UserError
from halfstep.session import fsdp

if TYPE_CHECKING:
    from halfstep.distributed.process_group import World
    from halfstep.machine.recommendation import Choice
    from halfstep.train.config import TrainConfig

FSDP2 = "fsdp2"
_MIN_BLOCKS = 2


def parallelize_model(
    model: nn.Module, config: TrainConfig, choice: Choice, world: World
) -> None:
    """Apply what must precede the optimizer to a model, in fp32 and in place."""
    if config.recompute:
        checkpoint_activations(model)
    if config.parallel == FSDP2:
        _shard(model, choice, world)
    if config.compile:
        _compile(model, world)


def checkpoint_activations(model: Any) -> None:  # noqa: ANN401 -- transformers adds the method
    """Enable activation checkpointing: recompute activations in the backward pass."""
    # The second is the name before transformers 5.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    name = next((name for name in names if hasattr(model, name)), names[-1])
    try:
        getattr(model, name)({"use_reentrant": False})
        model.config.use_cache = False  # avoids a warning that it is incompatible
    except (AttributeError, ValueError) as error:
        raise UserError(
            f"--recompute: {type(model).__name__} of transformers does not support "
            "activation checkpointing; leave it out."
        ) from error


def _shard(model: nn.Module, choice: Choice, world: World) -> None:
    if world.size == 1:
        raise UserError(
            "--parallel fsdp2 splits a model over processes, and there is one; start "
            "several with torchrun --nproc-per-node N, or use --parallel ddp."
        )
    if choice.level.low_weights and not choice.level.masters:
        raise UserError(
            f"--level {choice.level} does not go with --parallel fsdp2, whose parts "
            "are in fp32: use --level O2, or --parallel ddp."
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = fsdp.fsdp_policy(choice.level.name, choice.format.name)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of module lists, inner ones first, as FSDP2 shards them."""
    modules = [*model.modules()]
    lists = [each for each in modules if isinstance(each, nn.ModuleList)]
    blocks = {block for each in lists if len(each) >= _MIN_BLOCKS for block in each}
    return [each for each in reversed(modules) if each in blocks.difference(lists)]


def _compile(model: nn.Module, world: World) -> None:
    # torch, too, tries CXX first.
    compilers = (os.environ.get("CXX") or "g++", "g++", "clang++")
    if world.device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise UserError(
            "--compile needs a C++ compiler on a CPU, and g++ and clang++ are not "
            "there; install one, or leave it out."
        )
    # Batch widths vary; dynamic shapes avoid one compilation per width.
    model.compile(dynamic=True)

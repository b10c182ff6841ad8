"""Support for models sharded by FSDP2, whose fp32 shards serve as master weights.

It checks that a sharded model fits the level, and shards full tensors. Ranks agree on
an overflow in `scaling.found_inf_reduction`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.casting.module_rules import hooks_for
from halfstep.errors import UserError
from halfstep.machine.recommendation import resolve
from halfstep.masters import MasterWeights, NoMasters
from halfstep.masters.generic_step import narrow_all
from halfstep.numerics import formats
from halfstep.policy import decision, levels, op_tables
from halfstep.policy import rules as policy_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from halfstep.machine.recommendation import Choice
    from halfstep.masters.encoding import MasterEncoding
    from halfstep.policy.levels import Level
    from halfstep.policy.rules import Policy


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a model or a module in it."""
    return any(True for _ in _fsdp_modules(model))


def _fsdp_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, module) for each module that `fully_shard` was called on."""
    # If it was called, it is imported; otherwise the slow import is not needed.
    fsdp_module = sys.modules.get("torch.distributed.fsdp")
    fsdp_class: Any = getattr(fsdp_module, "FSDPModule", ())
    for path, module in model.named_modules() if fsdp_class else ():
        if isinstance(module, fsdp_class):
            yield path, module


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    choice: Choice,
    rules: Policy,
    *,
    master: str,
    release: bool,
) -> None:
    """Raise if a sharded model cannot be trained with these settings."""
    level = choice.level
    fsdp_module = sys.modules.get("torch.distributed.fsdp")
    fsdp1_class = getattr(fsdp_module, "FullyShardedDataParallel", None)
    if fsdp1_class is not None and level.low_weights and isinstance(model, fsdp1_class):
        raise UserError(
            f"level={level} cannot change weights inside FullyShardedDataParallel: "
            f"use torch.distributed.fsdp.fully_shard with {_policy_call(choice)}."
        )
    if not is_sharded(model):
        return
    check_not_replaced(model, [p for g in optimizer.param_groups for p in g["params"]])
    if release:
        raise UserError(
            "optimizer_in_backward=True leaves out non-finite gradients, and of "
            "one parameter FSDP2 gives each rank a part: ranks would not agree."
        )
    if not level.low_weights:
        return
    if level.masters and master != "fp32":
        raise UserError(
            f"master={master!r} with FSDP2, whose fp32 shards are already the master "
            "weights: leave master out."
        )
    fp32_paths = [
        scope.path
        for scope in hooks_for(model, rules)
        if scope.category == op_tables.FP32
    ]
    for path, name, param, low in _sharded_parameters(model):
        types = policy_rules.type_names(model.get_submodule(path))
        has_fp32_rule = bool({*fp32_paths} & {*decision.around(path)})
        stays_fp32 = has_fp32_rule or (
            level.fp32_norms and policy_rules.is_normalisation(types)
        )
        if level.masters:
            _check_group(
                model.get_submodule(path), path, low, choice, has_fp32_rule, stays_fp32
            )
        if param.is_floating_point() and not stays_fp32:
            _check_shard_dtype(name, param, choice)


def _policy_call(choice: Choice) -> str:
    return (
        f"mp_policy=halfstep.fsdp.fsdp_policy({choice.level.name!r}, "
        f"{choice.format.name!r})"
    )


def _check_group(
    module: nn.Module,
    path: str,
    low: torch.dtype | None,
    choice: Choice,
    has_fp32_rule: bool,
    stays_fp32: bool,
) -> None:
    """Raise if FSDP2 does not cast a module's weights to the level's dtype."""
    low = None if low == torch.float32 else low
    if low is None and stays_fp32:
        return
    if low is not None and has_fp32_rule:
        raise UserError(
            f"a rule keeps {path!r} in fp32, and FSDP2 casts its weights to {low}: "
            "call fully_shard on it first, without mp_policy."
        )
    if low != choice.format.dtype:
        raise UserError(
            f"level={choice.level} with FSDP2 computes in {choice.format}, and "
            f"fully_shard got {low or 'nothing'} for {path!r}: call "
            f"fully_shard(..., {_policy_call(choice)})."
        )
    if any(n.startswith("running_") for n, _ in module.named_buffers(recurse=False)):
        raise UserError(
            f"{path!r} has fp32 running statistics, and its kernel rejects "
            f"{choice.format} weights with them: call fully_shard on it first, without "
            "mp_policy."
        )


def _check_shard_dtype(name: str, param: Tensor, choice: Choice) -> None:
    """Raise if a shard is not stored in the level's dtype."""
    if choice.level.masters and param.dtype != torch.float32:
        raise UserError(
            f"{name!r} is sharded in {param.dtype}, and its shards must be the fp32 "
            "master weights: call fully_shard on the model while it is fp32."
        )
    if not choice.level.masters and param.dtype == torch.float32:
        raise UserError(
            f"level={choice.level} stores weights in 16 bits, and {name!r} is sharded "
            f"in fp32: call model.to({choice.format.dtype}) before fully_shard, or "
            "use level='O2'."
        )


def _sharded_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, str, Tensor, torch.dtype | None]]:
    """Yield (module path, name, parameter, dtype that FSDP2 casts to) of each shard."""
    groups = dict(_fsdp_modules(model))
    for path, module in model.named_modules():
        fsdp_path = next((p for p in decision.around(path) if p in groups), None)
        if fsdp_path is None:
            continue
        # torch has no public way to read the arguments of fully_shard.
        param_dtype = groups[fsdp_path]._get_fsdp_state()._mp_policy.param_dtype  # noqa: SLF001
        for name, param in module.named_parameters(path, recurse=False):
            if is_dtensor(param):
                yield path, name, param, param_dtype


def check_not_replaced(model: nn.Module, params: Iterable[Tensor]) -> None:
    """Raise if `fully_shard` has replaced parameters of the optimizer."""
    param_ids = {id(param) for param in params}
    named = dict(model.named_parameters())
    foreign = param_ids - {id(param) for param in named.values()}
    for name, param in named.items() if foreign else ():
        if is_dtensor(param) and param.requires_grad and id(param) not in param_ids:
            raise UserError(
                f"{name!r} was sharded after the optimizer was made, which still "
                "holds the unsharded one: call fully_shard first, then make the "
                "optimizer, then prepare."
            )


def conversion_level(model: nn.Module, level: Level) -> Level:
    """Return the level for `convert_`, changed so that fp32 shards stay fp32."""
    if level.masters and is_sharded(model):
        return replace(level, low_weights=False, fp32_norms=False)
    return level


def make_masters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    choice: Choice,
    encoding: MasterEncoding | None,
    originals: dict[nn.Parameter, Tensor],
) -> MasterWeights:
    """Return the master weights of a converted model; `NoMasters` if it has none."""
    if encoding is not None:
        return MasterWeights(optimizer, originals, master=encoding.name)
    narrow_all(optimizer, originals)
    if choice.level.masters and is_sharded(model):
        return NoMasters(optimizer, _describe_shards(model, choice))
    return NoMasters(optimizer)


def _describe_shards(model: nn.Module, choice: Choice) -> str:
    """Return a line that describes the shards as master weights."""
    parts = list(_sharded_parameters(model))
    norms = {
        path
        for path, _, _, low in parts
        if low == choice.format.dtype
        and policy_rules.is_normalisation(
            policy_rules.type_names(model.get_submodule(path))
        )
    }
    count = sum(param.numel() for _, _, param, _ in parts)
    text = (
        f"master weights: FSDP2's fp32 shards of {count} parameters, cast to "
        f"{choice.format} for each pass"
    )
    return text + f", {len(norms)} normalisation layers too" if norms else text


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor sharded like another of the same shape.

    If the result needs data of other ranks, all of them must call this.
    """
    mesh = getattr(like, "device_mesh", None)
    if is_dtensor(value) and getattr(value, "device_mesh", None) != mesh:
        value = value.full_tensor()  # type: ignore[attr-defined]
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)  # noqa: S101
    if not isinstance(value, DTensor):
        everywhere = [Replicate()] * like.device_mesh.ndim
        value = DTensor.from_local(
            value.to(like.device), like.device_mesh, everywhere, run_check=False
        )
    return value.redistribute(like.device_mesh, like.placements)


def fsdp_policy(
    level: str = "O2",
    dtype: str | torch.dtype = "bf16",
    *,
    reduce_dtype: torch.dtype | None = None,
) -> MixedPrecisionPolicy:
    """Return the `mp_policy` of `fully_shard` for a level.

    At O2 the shards stay fp32 and are the master weights: FSDP2 gathers them in 16
    bits and sums gradients over ranks in 16 bits; operations are cast by autocast. All
    weights of the call are gathered in 16 bits, normalisation layers too; call
    `fully_shard` without a policy on modules that must stay fp32 first. At the other
    levels FSDP2 casts nothing.

    Args:
        level: The level for `prepare`, "O0" to "O3".
        dtype: "bf16" or "fp16".
        reduce_dtype: Dtype in which gradients are summed over ranks. Default: `dtype`.
            `torch.float32` sends twice the bytes and rounds less.

    Example:
        >>> fsdp_policy("O2", "bf16").param_dtype
        torch.bfloat16
        >>> fsdp_policy("O1", "bf16").param_dtype
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    choice = resolve(levels.parse(level), formats.parse(dtype), "cpu")
    param_dtype = choice.format.dtype if choice.level.masters else None
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        # If None, newer versions of torch reduce in the dtype of the shards.
        reduce_dtype=reduce_dtype or param_dtype,
        cast_forward_inputs=False,
    )

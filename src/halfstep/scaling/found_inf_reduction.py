"""Reduces found_inf over ranks, so that all of them skip a step, or none.

In: a flag of this rank and its gradients. Out: the maximum over all ranks that hold
parts of them: shards of FSDP2, tensor parallelism, or a process group of the user.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.scaling.unscale import max_flag

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def reduction_groups(
    gradients: Iterable[Tensor], group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that must agree about an optimizer's gradients.

    This is the user's group if there is one. Otherwise there is one group for each mesh
    dimension over which a DTensor is sharded (with FSDP2: one). Replicas need none, as
    their values are equal.
    """
    if group is not None:
        return [group]
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups: dict[int, dist.ProcessGroup] = {}
    parts: list[Any] = [part for part in gradients if hasattr(part, "to_local")]
    for part in parts:
        for direction, placement in enumerate(part.placements):
            if not placement.is_replicate():
                mesh_group = part.device_mesh.get_group(direction)
                groups[id(mesh_group)] = mesh_group
    return list(groups.values())


def reduce_found_inf(
    found_inf: Tensor, gradients: Iterable[Tensor], group: dist.ProcessGroup | None
) -> Tensor:
    """Reduce `found_inf` in place over the ranks that must agree; return it.

    Why: if one rank alone skips, weights differ between ranks, or the others hang.
    Every rank of each group must call this.
    """
    for each in reduction_groups(gradients, group):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, each)
    return found_inf


def start_reduction(
    flags: dict[torch.device, Tensor],
    zero: Tensor,
    gradients: Iterable[Tensor],
    group: dist.ProcessGroup | None,
    state: dict[str, Any],
) -> dict[torch.device, Tensor]:
    """Start to reduce an optimizer's flags over ranks; return the flags to store.

    The all-reduce starts when the flag is known and is waited for when it is needed: in
    between (`unscale_` and `step` of a `GradScaler`), gradients are clipped.

    Args:
        flags: Device -> flag of this rank.
        zero: 0.0, shape (), on the device of the result: the flag of a rank without
            gradients, which must take part, or the others hang.
        gradients: All gradients of the optimizer.
        group: As for `reduction_groups`.
        state: The `GradScaler`'s state of this optimizer, for `reduced_flags`.
    """
    groups = reduction_groups(gradients, group)
    if not groups:
        return flags
    flag = max_flag([zero, *flags.values()], zero.device)
    works = (
        dist.all_reduce(flag, dist.ReduceOp.MAX, each, async_op=True) for each in groups
    )
    # The second mesh dimension needs the result of the first.
    state["found_inf_reduction"] = itertools.chain([next(works)], works)
    return {flag.device: flag}


def reduced_flags(*states: dict[str, Any]) -> list[Tensor]:
    """Return the flags in a `GradScaler`'s states of optimizers, equal on all ranks."""
    flags: list[Tensor] = []
    for state in states:
        for work in state.get("found_inf_reduction", ()):
            work.wait()
        flags += state["found_inf_per_device"].values()
    return flags

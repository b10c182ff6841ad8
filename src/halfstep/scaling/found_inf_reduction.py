"""Reduces found_inf over ranks, so that all of them skip a step, or none.

In: a flag of this rank and its gradients. Out: the maximum over all ranks that hold
parts of them: shards of FSDP2, tensor parallelism, or a process group of the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from torch import Tensor


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

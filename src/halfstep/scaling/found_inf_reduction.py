"""Makes found_inf the same on every rank, so that all skip a step, or none.

In: a flag of this rank, and the gradients it speaks of. Out: the flag of all ranks that
hold parts of them: the shards of FSDP2, tensor parallelism, or a group of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.scaling.unscale import max_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any


def reduction_groups(
    gradients: Iterable[Tensor], group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that must agree about an optimizer's gradients.

    The user's own group is then the only one. Without it there is one for each
    direction in which a DTensor is split: with FSDP2 that is one group. Replicas hold
    the same numbers anyway.
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


@dataclass
class FoundInfReduction:
    """One flag on its way to being every rank's.

    Why: a rank that skips alone leaves the others with other weights, or waiting for
    ever. The exchange is started as soon as the flag is known, and waited for where
    it is needed: between `unscale_` and `step` of a `GradScaler` gradients are clipped.
    """

    flag: Tensor
    """0.0 or 1.0, shape (); every rank's once `wait` has returned."""
    _wait_pending: Callable[[], Any] | None = None
    _pending_groups: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def start(
        cls, flag: Tensor, groups: Sequence[dist.ProcessGroup]
    ) -> FoundInfReduction:
        """Start to exchange a flag; every rank of each group must come here."""
        reduction = cls(flag, _pending_groups=list(groups))
        reduction._start_next()
        return reduction

    def _start_next(self) -> None:
        # The second direction of a mesh has to wait for what the first one found.
        if self._pending_groups:
            group = self._pending_groups.pop(0)
            work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group, async_op=True)
            self._wait_pending = work.wait

    def wait(self) -> Tensor:
        """Return the flag, the same on each rank. Later calls cost nothing."""
        while self._wait_pending is not None:
            self._wait_pending()
            self._wait_pending = None
            self._start_next()
        return self.flag


def reduce_found_inf(
    found_inf: Tensor, gradients: Iterable[Tensor], group: dist.ProcessGroup | None
) -> Tensor:
    """Return `found_inf` once all ranks concerned agree; it is written in place."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return found_inf
    groups = reduction_groups(gradients, group)
    return FoundInfReduction.start(found_inf, groups).wait() if groups else found_inf


def start_reduction(
    flags: dict[torch.device, Tensor],
    zero: Tensor,
    gradients: Iterable[Tensor],
    group: dist.ProcessGroup | None,
    state: dict[str, Any],
) -> dict[torch.device, Tensor]:
    """Start to reduce an optimizer's flags over ranks; return the flags to keep.

    Args:
        flags: By device, of this rank.
        zero: 0.0, shape (), on the device of the result: what a rank without gradients
            takes part with, or the others would wait for ever.
        gradients: All of the optimizer.
        group: As for `reduction_groups`.
        state: What a `GradScaler` keeps of it; `reduced_flags` waits for it.
    """
    groups = reduction_groups(gradients, group)
    if not groups:
        return flags
    flag = max_flag([zero, *flags.values()], zero.device)
    state["found_inf_reduction"] = FoundInfReduction.start(flag, groups)
    return {flag.device: flag}


def reduced_flags(state: dict[str, Any]) -> list[Tensor]:
    """Return an optimizer's flags, the same on every rank.

    Args:
        state: What a `GradScaler` keeps of one optimizer in one iteration.
    """
    if "found_inf_reduction" in state:
        state["found_inf_reduction"].wait()
    return list(state["found_inf_per_device"].values())


def reduce_over_ranks(
    tensor: Tensor, reduce_op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    """Return a tensor reduced over ranks, so that all ask for the same.

    Why: gradients of 16 bits are a rank's own, and so are shards. Ranks with different
    scales would average gradients that are not alike.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor, reduce_op, group)
    return tensor

"""Unscaling, looking for inf and NaN in the same pass, and what ranks make of it.

In: lists of gradients, and one over the loss scale. Out: the gradients, unscaled in
place, and a flag that says whether one of them was not finite here or on another rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep._torch.async_read import moved
from halfstep.numerics.local_tensor import stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

_DTYPE = attrgetter("dtype")
_PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@torch.no_grad()
def unscale_(
    gradients: Iterable[Tensor], inverse: Tensor, *, again: bool = False
) -> Tensor:
    """Multiply gradients by `inverse` in place; return 1.0 if any was not finite.

    Does not wait for the device. The check looks at the scaled numbers, as torch's
    does: with a scale of 1 or more, unscaling cannot create an inf.

    Args:
        gradients: Floating or complex tensors, dense or sparse, on any devices; of a
            DTensor this rank's part.
        inverse: One over the loss scale. float32, shape ().
        again: Look a second time, for what multiplying by more than 1 made infinite.

    Returns:
        0.0 or 1.0 in float32, shape (), on the device of `inverse`. It speaks of this
        rank; `Agreement` makes it everybody's.
    """
    flags = unscale_by_device_(list(gradients), inverse, again=again)
    return highest([torch.zeros_like(inverse), *flags.values()], inverse.device)


def highest(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest of some flags, on one device.

    Why: torch adds them. Two overflowing devices give 2, and torch's fused kernels,
    which compare with 1, then apply the step that overflowed.
    """
    here = [moved(flag, device) for flag in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax()


@torch.no_grad()
def unscale_by_device_(
    gradients: list[Tensor],
    inverse: Tensor,
    dtypes: set[torch.dtype] | None = None,
    *,
    again: bool = False,
) -> dict[torch.device, Tensor]:
    """Do the same; return a flag for each device, 0.0 or 1.0 in float32, shape ().

    Args:
        gradients: As for `unscale_`.
        inverse: As for `unscale_`.
        dtypes: Those of the gradients, where the caller knows them.
        again: As for `unscale_`.
    """
    if not gradients:
        return {}
    if again:
        flags = unscale_by_device_(gradients, inverse, dtypes)
        more = unscale_by_device_(gradients, torch.ones_like(inverse), dtypes)
        return {at: torch.maximum(flags[at], more[at]) for at in flags}
    here = inverse.device
    if here.type == "cpu" and not torch.accelerator.is_available():
        # The usual case first: a thousand small tensors cost more Python than work.
        dtypes = dtypes_of(gradients) if dtypes is None else dtypes
        if dtypes <= _PLAIN and not _sharded(gradients):
            flag = torch.zeros_like(inverse)
            if _check_and_unscale_(gradients, flag, inverse):
                return {here: flag}
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        values = stored(gradient)
        groups[values.device, values.dtype].append(values)
    flags = {}
    for (device, dtype), group in groups.items():
        factor = moved(inverse, device)
        flag = flags.setdefault(device, torch.zeros_like(factor))
        if device.type == "cuda" and dtype == torch.bfloat16:
            # torch's kernel has no bf16 form on CUDA.
            peaks = torch.stack(torch._foreach_norm(group, torch.inf))  # noqa: SLF001
            torch._foreach_mul_(group, factor)
            flag.copy_(torch.maximum(flag, (~torch.isfinite(peaks).all()).float()))
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
    return flags


def divided(gradients: Iterable[Tensor], scale: Tensor) -> list[Tensor]:
    """Return copies of gradients as a fused kernel will divide them, in fp32 at least.

    For a scale below 1, where that can overflow; elsewhere it is wasted memory.
    """
    held = [stored(gradient) for gradient in gradients]
    kinds = [torch.promote_types(values.dtype, torch.float32) for values in held]
    pairs = zip(held, kinds, strict=True)
    return [values.to(kind) / moved(scale, values.device) for values, kind in pairs]


def dtypes_of(gradients: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the dtypes of some tensors."""
    return set(map(_DTYPE, gradients))


def _check_and_unscale_(group: list[Tensor], flag: Tensor, factor: Tensor) -> bool:
    """Run torch's kernel; return False, with nothing done, if a tensor is sparse."""
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
    except NotImplementedError:
        # It is the dispatcher that refuses, for one sparse tensor among all, before
        # any of them is touched. Asking each first would cost a fifth of the pass.
        return False
    return True


def _sharded(gradients: Iterable[Tensor]) -> bool:
    """Say whether one of them is a DTensor, which no process without a group has."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return any(hasattr(kind, "to_local") for kind in set(map(type, gradients)))


def groups_of(
    gradients: Iterable[Tensor], group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that must agree about these gradients.

    Args:
        gradients: All of one optimizer.
        group: The user's own; it has the last word, and is then the only one.

    Returns:
        Without a group of the user's, one for each direction in which a DTensor is
        split: with FSDP2 that is one group. Replicas hold the same numbers anyway.
    """
    if group is not None:
        return [group]
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found: dict[int, dist.ProcessGroup] = {}
    parts: list[Any] = [part for part in gradients if hasattr(part, "to_local")]
    for part in parts:
        for direction, placement in enumerate(part.placements):
            if not placement.is_replicate():
                own = part.device_mesh.get_group(direction)
                found[id(own)] = own
    return list(found.values())


@dataclass
class Agreement:
    """One flag on its way to being every rank's.

    Why: a rank that skips alone leaves the others with other weights, or waiting for
    ever. The exchange is started as soon as the flag is known, and waited for where
    it is needed: between `unscale_` and `step` of a `GradScaler` gradients are clipped.
    """

    flag: Tensor
    """0.0 or 1.0, shape (); every rank's once `wait` has returned."""
    _under_way: Callable[[], Any] | None = None
    _still: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def begin(cls, flag: Tensor, groups: Sequence[dist.ProcessGroup]) -> Agreement:
        """Start to exchange a flag; every rank of each group must come here."""
        agreement = cls(flag, _still=list(groups))
        agreement._next()
        return agreement

    def _next(self) -> None:
        # The second direction of a mesh has to wait for what the first one found.
        if self._still:
            group = self._still.pop(0)
            work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group, async_op=True)
            self._under_way = work.wait

    def wait(self) -> Tensor:
        """Return the flag, the same on each rank. Later calls cost nothing."""
        while self._under_way is not None:
            self._under_way()
            self._under_way = None
            self._next()
        return self.flag


def exchange(
    flags: dict[torch.device, Tensor],
    nothing: Tensor,
    gradients: Iterable[Tensor],
    group: dist.ProcessGroup | None,
    state: dict[str, Any],
) -> dict[torch.device, Tensor]:
    """Start to ask the other ranks about an optimizer's gradients, where there are any.

    Args:
        flags: By device, as seen here.
        nothing: 0.0, shape (), where the answer is wanted. A rank without gradients
            comes along with that, or the others wait for ever.
        gradients: All of the optimizer.
        group: As for `groups_of`.
        state: What a `GradScaler` keeps of it; `agreed` waits for what is put there.

    Returns:
        The flags to keep.
    """
    groups = groups_of(gradients, group)
    if not groups:
        return flags
    flag = highest([nothing, *flags.values()], nothing.device)
    state["agreement"] = Agreement.begin(flag, groups)
    return {flag.device: flag}


def agreed(state: dict[str, Any]) -> list[Tensor]:
    """Return an optimizer's flags, the same on every rank.

    Args:
        state: What a `GradScaler` keeps of one optimizer in one iteration.
    """
    if "agreement" in state:
        state["agreement"].wait()
    return list(state["found_inf_per_device"].values())


def over_ranks(
    tensor: Tensor, how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    """Return a tensor reduced over ranks, so that all ask for the same.

    Why: gradients of 16 bits are a rank's own, and so are shards. Ranks with different
    scales would average gradients that are not alike.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor, how, group)
    return tensor

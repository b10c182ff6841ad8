"""Unscales gradients in place and reports whether any is non-finite on this rank."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep._torch.async_read import to_device_async
from halfstep.numerics.local_tensor import local_values
from halfstep.numerics.norms import absmax_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DTYPE = attrgetter("dtype")
_KERNEL_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@torch.no_grad()
def unscale_(
    gradients: Iterable[Tensor], inverse: Tensor, *, recheck: bool = False
) -> Tensor:
    """Multiply gradients by `inverse` in place; return 1.0 if any is non-finite.

    It does not synchronize. The scaled numbers are checked, as in torch: with a scale
    of 1 or more, unscaling cannot create an inf.

    Args:
        gradients: Floating or complex tensors, dense or sparse, on any devices; of a
            DTensor this rank's part.
        inverse: 1 / loss scale. float32, shape ().
        recheck: Check again after unscaling, for scales below 1.

    Returns:
        0.0 or 1.0 in float32, shape (), on the device of `inverse`; for this rank only.

    Example:
        >>> grads = [torch.tensor([2.0, 4.0])]
        >>> unscale_(grads, torch.tensor(0.5)), grads
        (tensor(0.), [tensor([1., 2.])])
    """
    flags = unscale_by_device_(list(gradients), inverse, recheck=recheck)
    if [*flags] == [inverse.device]:
        return flags[inverse.device]
    return max_flag([torch.zeros_like(inverse), *flags.values()], inverse.device)


def max_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the maximum of flags, on one device.

    Why: torch sums them. Two devices that overflow give 2, and torch's fused kernels,
    which compare with 1, then apply the step that overflowed.
    """
    local_flags = [to_device_async(flag, device) for flag in flags]
    return local_flags[0] if len(local_flags) == 1 else torch.stack(local_flags).amax()


@torch.no_grad()
def unscale_by_device_(
    gradients: list[Tensor],
    inverse: Tensor,
    dtypes: set[torch.dtype] | None = None,
    *,
    recheck: bool = False,
) -> dict[torch.device, Tensor]:
    """As `unscale_`, but return device -> flag, 0.0 or 1.0 in float32, shape ()."""
    if not gradients:
        return {}
    if recheck:
        flags = unscale_by_device_(gradients, inverse, dtypes)
        recheck_flags = unscale_by_device_(gradients, torch.ones_like(inverse), dtypes)
        return {at: torch.maximum(flags[at], recheck_flags[at]) for at in flags}
    inverse_device = inverse.device
    if inverse_device.type == "cpu" and not torch.accelerator.is_available():
        # Fast path: for a thousand small tensors, Python overhead dominates.
        dtypes = dtypes_of(gradients) if dtypes is None else dtypes
        if dtypes <= _KERNEL_DTYPES and not _has_dtensor(gradients):
            flag = torch.zeros_like(inverse)
            if _check_and_unscale_(gradients, flag, inverse):
                return {inverse_device: flag}
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        values = local_values(gradient)
        groups[values.device, values.dtype].append(values)
    flags = {}
    for (device, dtype), group in groups.items():
        factor = to_device_async(inverse, device)
        flag = flags.setdefault(device, torch.zeros_like(factor))
        if device.type == "cuda" and dtype == torch.bfloat16:
            # torch's kernel does not support bf16 on CUDA.
            is_finite = torch.isfinite(absmax_of(group)).all()
            torch._foreach_mul_(group, factor)
            flag.copy_(torch.maximum(flag, (~is_finite).float()))
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
    return flags


def divided_copies(gradients: Iterable[Tensor], scale: Tensor) -> list[Tensor]:
    """Return copies divided as in a fused kernel, in fp32 or wider.

    To check for overflow at a scale below 1; otherwise they would waste memory.
    """
    copies = []
    for values in map(local_values, gradients):
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        copies.append(wide / to_device_async(scale, values.device))
    return copies


def dtypes_of(gradients: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the dtypes of tensors."""
    return set(map(_DTYPE, gradients))


def _check_and_unscale_(group: list[Tensor], flag: Tensor, factor: Tensor) -> bool:
    """Run torch's kernel; return False, with nothing done, if a tensor is sparse."""
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
    except NotImplementedError:
        # The dispatcher raises if one tensor is sparse, before any is changed. Checking
        # each beforehand would cost a fifth of the pass.
        return False
    return True


def _has_dtensor(gradients: Iterable[Tensor]) -> bool:
    """Return whether one is a DTensor; without a process group none is."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return any(hasattr(kind, "to_local") for kind in set(map(type, gradients)))

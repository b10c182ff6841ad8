"""Computes norms of many tensors: of all together, and the largest of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from halfstep._torch import async_read
from halfstep._torch.async_read import to_device_async
from halfstep.numerics.formats import is_low
from halfstep.numerics.local_tensor import dense_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients as one vector, the same on every rank.

    They may be of any dtype, and sparse; of DTensors, all ranks' parts count.
    """
    # A 16-bit norm would overflow long before the gradients do, and the parts of a
    # sparse gradient would be added in 16 bits.
    wide = [g.float() if is_low(g.dtype) else g for g in gradients]
    values = [g if hasattr(g, "full_tensor") else dense_values(g) for g in wide]
    norms = [nn.utils.get_total_norm(group) for group in group_by_mesh(values)]
    full = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    return full[0] if len(full) == 1 else nn.utils.get_total_norm(full)


def absmax_of(gradients: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude of each gradient, without synchronization.

    Args:
        gradients: At least one, of any kind and on any devices.

    Returns:
        Shape (n,), on the device of the first. NaN if there is one; 0 if it is empty.
    """
    stored = []
    for values in map(dense_values, gradients):
        if values.is_complex():  # its modulus may overflow where its parts do not
            values = torch.view_as_real(values.resolve_conj())  # noqa: PLW2901
        stored.append(values if values.numel() else values.new_zeros(1))
    norms = torch._foreach_norm(stored, torch.inf)  # noqa: SLF001
    device = norms[0].device
    return torch.stack([to_device_async(norm, device) for norm in norms])


def nonfinite_marks(gradients: Sequence[Tensor], absmax: Tensor) -> Tensor:
    """Return for each gradient whether it holds inf, and whether NaN.

    Synchronizes only where reading a value does not wait.

    Args:
        gradients: The gradients.
        absmax: Their `absmax_of`, shape (n,).

    Returns:
        Shape (2, n), on the device of `absmax`: 1.0 for inf, 1.0 for NaN, else 0.0.
    """
    has_nan = absmax.isnan()
    has_inf = absmax.isinf()
    if absmax.device.type not in async_read.READABLE_DEVICES or bool(has_nan.any()):
        anywhere = [dense_values(gradient).isinf().any() for gradient in gradients]
        has_inf = torch.stack(
            [to_device_async(any_, absmax.device) for any_ in anywhere]
        )
    return torch.stack((has_inf, has_nan)).float()


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that one foreach call can take: plain ones, and by device mesh."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())

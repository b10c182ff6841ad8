"""The numbers behind a tensor: of a sparse one, of a DTensor, of a quantized one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a quantized one is kept in, such as torchao's; or itself.

    Those of a DTensor are not asked for: it takes all operations itself.
    """
    if not is_quantized(tensor):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def is_quantized(tensor: Tensor) -> bool:
    """Say whether a tensor of a subclass only looks like one of its dtype."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return is_wrapper and not hasattr(tensor, "to_local")


def clone(tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own; quantized tensors have no `clone`."""
    if not is_quantized(tensor):
        return tensor.clone()
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {name: clone(getattr(tensor, name)) for name in names}
    copy: Tensor = wrapper.__tensor_unflatten__(
        parts, context, tensor.size(), tensor.stride()
    )
    return copy


def local_values(gradient: Tensor) -> Tensor:
    """Return the real numbers behind a gradient on this rank, to be changed in place.

    Args:
        gradient: Dense or sparse, real or complex, plain or a DTensor.
    """
    values = local_part(gradient)
    values = values._values() if values.is_sparse else values  # noqa: SLF001
    # The conjugate of a lazily conjugated tensor is the memory behind it.
    values = values.conj() if values.is_conj() else values
    return torch.view_as_real(values) if values.is_complex() else values


def dense_values(tensor: Tensor) -> Tensor:
    """Return the stored numbers of a tensor: of a sparse one, of a rank's part."""
    local = local_part(tensor)
    return local.coalesce().values() if local.is_sparse else local

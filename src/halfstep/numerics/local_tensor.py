"""Accesses the stored values of sparse, distributed and quantized tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the inner tensors of a quantized tensor, such as torchao's, or `[tensor]`.

    DTensors are not unwrapped, since they support all operations.
    """
    if not is_quantized(tensor):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a wrapper subclass stores other data than its dtype suggests."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return is_wrapper and not hasattr(tensor, "to_local")


def clone(tensor: Tensor) -> Tensor:
    """Return a copy in new memory; quantized tensors have no `clone`."""
    if not is_quantized(tensor):
        return tensor.clone()
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {name: clone(getattr(tensor, name)) for name in names}
    shape = tensor.size(), tensor.stride()
    copy: Tensor = wrapper.__tensor_unflatten__(parts, context, *shape)
    return copy


def local_values(gradient: Tensor) -> Tensor:
    """Return a writable real view of any gradient's values on this rank."""
    values = local_part(gradient)
    values = values._values() if values.is_sparse else values  # noqa: SLF001
    # conj() of a lazily conjugated tensor returns its unconjugated memory.
    values = values.conj() if values.is_conj() else values
    return torch.view_as_real(values) if values.is_complex() else values


def dense_values(tensor: Tensor) -> Tensor:
    """Return a tensor's stored values on this rank, as a dense tensor."""
    local = local_part(tensor)
    return local.coalesce().values() if local.is_sparse else local

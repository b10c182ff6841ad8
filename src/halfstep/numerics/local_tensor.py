"""The numbers of a tensor that lie on this rank: of a sparse one, of a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


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

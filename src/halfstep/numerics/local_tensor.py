"""The numbers of a tensor that lie on this rank: of a sparse one, of a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import Tensor


def local_values(gradient: Tensor) -> Tensor:
    """Return the real numbers behind a gradient on this rank, to be changed in place.

    Args:
        gradient: Dense or sparse, real or complex, plain or a DTensor.
    """
    values = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    values = values._values() if values.is_sparse else values  # noqa: SLF001
    # The conjugate of a lazily conjugated tensor is the memory behind it.
    values = values.conj() if values.is_conj() else values
    return torch.view_as_real(values) if values.is_complex() else values


def dense_values(tensor: Tensor) -> Tensor:
    """Return the stored numbers of a tensor: of a sparse one, of a rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.coalesce().values() if local.is_sparse else local

"""Tells whether other tensors refer to a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor

_OWN_REFERENCES = 2
"""Use count of an unshared storage: the tensor, and the caller that counts."""


def is_shared(buffer: Tensor) -> bool:
    """Return whether another tensor uses the memory: a gradient that the user keeps.

    True for tensor subclasses, whose memory is that of other tensors.
    """
    if type(buffer) is not Tensor:
        return True
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES  # noqa: SLF001

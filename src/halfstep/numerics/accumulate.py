"""Adds 16-bit tensors to fp32 tensors without temporary memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 18
"""Elements added at a time on a CPU; their fp32 copies, 1 MiB, stay in its cache."""


@torch.no_grad()
def add_(total: Tensor, part: Tensor) -> None:
    """Add a 16-bit tensor to an fp32 one of the same shape, in place.

    Why: on a CPU, torch first copies all of `part` to fp32, into new memory.
    """
    flat = total.is_contiguous() and part.is_contiguous()
    if total.device.type != "cpu" or not flat or total.numel() <= _CHUNK:
        total.add_(part)
        return
    torch._foreach_add_(total.view(-1).split(_CHUNK), part.view(-1).split(_CHUNK))  # type: ignore[no-untyped-call]

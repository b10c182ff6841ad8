"""Restores the running statistics of batch norms when a step is skipped.

The forward pass updates them before an inf is detected: one batch with an inf would
leave NaN in them for the rest of the run.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep._torch.async_read import to_device_async
from halfstep.numerics.local_tensor import local_part

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class RunningStats:
    """A copy of the running statistics of a model, from before a step."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, _NormBase) and module.track_running_stats
        ]
        self._buffers: list[Tensor] = []
        self._copies: list[_FlatCopy] = []
        if self._norms:
            self.save()

    def __bool__(self) -> bool:
        """Return whether the model has running statistics."""
        return bool(self._norms)

    @torch.no_grad()
    def save(self) -> None:
        """Copy the current values."""
        tables = (norm._buffers for norm in self._norms)  # noqa: SLF001
        named = (table.get(name) for table in tables for name in _NAMES)
        buffers = [b for b in named if b is not None and not nn.parameter.is_lazy(b)]
        if [*map(id, buffers)] == [*map(id, self._buffers)]:
            for copy in self._copies:
                copy.save()
            return
        # Moving a model, or `load_state_dict(assign=True)`, replaces its buffers.
        by_dtype = defaultdict(list)
        for buffer in map(local_part, buffers):
            by_dtype[buffer.device, buffer.dtype].append(buffer)
        self._buffers, self._copies = buffers, [*map(_FlatCopy, by_dtype.values())]

    @torch.no_grad()
    def restore(self, found_inf: Tensor) -> None:
        """Write the copy back if `found_inf` is 1, then copy the current values."""
        for copy in self._copies:
            copy.restore(found_inf)


class _FlatCopy:
    """Buffers of one dtype on one device, copied in a few kernels.

    Old or new values are selected on the device, without synchronization.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._flat = [buffer.view(-1) for buffer in buffers]
        self._saved = torch.cat(self._flat)
        parts = torch.split(self._saved, [buffer.numel() for buffer in buffers])
        self._parts = [
            part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)
        ]

    def save(self) -> None:
        torch.cat(self._flat, out=self._saved)

    def restore(self, found_inf: Tensor) -> None:
        skipped = to_device_async(found_inf, self._saved.device) > 0
        torch.where(skipped, self._saved, torch.cat(self._flat), out=self._saved)
        torch._foreach_copy_(self._buffers, self._parts)

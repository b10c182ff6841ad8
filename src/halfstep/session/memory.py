"""Measures the memory of weights, gradients, master weights and optimizer moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.numerics.local_tensor import inner_tensors, local_part
from halfstep.reporting.table import Report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from halfstep.masters import MasterWeights


class Footprint(Report, dict[str, int]):
    """Purpose -> bytes; prints as one line in KiB, MiB, ..."""

    def __repr__(self) -> str:
        """Return one line."""
        parts = [f"{name} {_format_bytes(count)}" for name, count in self.items()]
        return f"{', '.join(parts)}: {_format_bytes(sum(self.values()))} in all"


def _format_bytes(count: int) -> str:
    """Return bytes in the largest unit that leaves at least 1."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:  # noqa: PLR2004
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def memory_by_use(model: nn.Module, masters: MasterWeights) -> Footprint:
    """Return the bytes allocated now; shared storages count once.

    Residuals are "masters", all tensors of the optimizer's state "moments"; gradients
    of either dtype and their accumulation buffers are "gradients".
    """
    seen: set[int] = set()
    master_params = masters.master_params.values()
    weights = [*model.parameters(), *model.buffers()]
    params = [p for group in masters.optimizer.param_groups for p in group["params"]]
    gradients = [t.grad for t in (*weights, *params) if t.grad is not None]
    buffers = [s.grad_buffer for s in master_params if s.grad_buffer is not None]
    residuals = [slot.residual for slot in master_params if slot.residual is not None]
    states = [
        value
        for state in masters.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
        for value in inner_tensors(value)
    ]
    return Footprint(
        weights=_bytes(weights, seen),
        gradients=_bytes([*gradients, *buffers], seen),
        masters=_bytes([*residuals, *(slot.master for slot in master_params)], seen),
        moments=_bytes(states, seen),
    )


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of the tensors' storages that are not in `seen`; add them."""
    total = 0
    for tensor in tensors:
        local = local_part(tensor)
        if local.layout != torch.strided:
            total += local._values().nbytes + local._indices().nbytes  # noqa: SLF001
            continue
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total

"""Records a flag or statistics for each tensor that a probe observes in one step.

Values stay on the device until the probe copies them to the host.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep._torch import async_read
from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.tensor_counts import DTYPES, Counts, add_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.numerics.formats import FloatFormat

Key = tuple[int, str]
"""Index of a name, and the dtype observed under it."""
FlagOrStats = bool | Tensor | tuple[Counts, str] | None
"""Result for one tensor: whether it is non-finite (CPU); its largest magnitude, shape
(), which needs no synchronization (GPU); or its counts and dtype. None if not float."""
_WORDS = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_SUM_DTYPES = {dtype: dtype for dtype in DTYPES} | {torch.float16: torch.float32}


def _floats(tensor: Tensor) -> Tensor | None:
    """Return the values as a dense real tensor; None if empty or not floating."""
    values = tensor.detach()
    # A nested tensor may report a strided layout although it has no shape.
    plain = type(values) is Tensor and values.layout is torch.strided
    if not plain or values.is_nested:
        values = dense_values(values)
        values = values.values() if values.is_nested else values
    if values.dtype in DTYPES:
        return values if values.numel() else None
    if values.is_complex():
        return _floats(torch.view_as_real(values.resolve_conj()))
    return None


def _sum_is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor's sum is finite, which implies that each value is.

    A sum takes a third of the time of `aminmax`.
    """
    total: float = tensor.sum(dtype=_SUM_DTYPES[tensor.dtype]).item()
    return total - total == 0


def _is_nonfinite(values: Tensor) -> bool:
    if _sum_is_finite(values):
        return False
    low, high = torch.aminmax(values)  # the sum may only have overflowed
    return not (bool(low.isfinite()) and bool(high.isfinite()))


class StepRecords:
    """Flags of the tensors observed since `clear`; with `full`, their statistics."""

    def __init__(self, casts: tuple[FloatFormat, ...], *, full: bool) -> None:
        self._casts = casts
        self.full = full
        self.clear()

    def clear(self) -> None:
        """Remove all records."""
        self.order: dict[int, None] = {}
        """Indices of names in the order in which they were first observed."""
        self.nonfinite: dict[int, bool] = {}
        """Index of a name -> whether it was non-finite."""
        self.peaks: list[tuple[int, Tensor]] = []
        """Index of a name, and largest magnitude on the device, shape ()."""
        self.stats: dict[Key, Counts] = {}

    def measure(self, tensor: Tensor) -> FlagOrStats:
        """Return the flag or statistics of one tensor; None if it is not floating."""
        values = _floats(tensor)
        if values is None:
            return None
        with torch._C._DisableAutocast():  # noqa: SLF001 -- it would cast first
            if self.full:
                counts = Counts.zeros(len(self._casts), values.device)
                add_(counts, values, self._casts)
                return counts, _WORDS[values.dtype]
            if values.device.type in async_read.READABLE_DEVICES:
                return _is_nonfinite(values)
            # One kernel; its result is non-finite if a value is.
            peak: Tensor = torch.linalg.vector_norm(values, torch.inf)
            return peak

    def record(
        self, number: int, flag_or_stats: FlagOrStats, *, replace: bool = False
    ) -> None:
        """Record a result of `measure` under a name; add to or replace earlier ones."""
        self.order.setdefault(number)
        if isinstance(flag_or_stats, bool):
            self.nonfinite[number] = flag_or_stats or self.nonfinite.get(number, False)
        elif isinstance(flag_or_stats, Tensor):
            self.peaks.append((number, flag_or_stats))
        elif flag_or_stats is not None:
            counts, dtype = flag_or_stats
            before = None if replace else self.stats.get((number, dtype))
            self.stats[number, dtype] = counts if before is None else before.add(counts)

    @torch.no_grad()
    def measure_all(self, named: Sequence[tuple[int, Tensor]]) -> None:
        """Measure and record several tensors; for flags, all of one dtype together.

        Uses one kernel on a GPU, and one `item` on a CPU if all are finite.
        """
        groups: defaultdict[object, list[tuple[int, Tensor]]] = defaultdict(list)
        for number, tensor in named:
            if self.full:
                self.record(number, self.measure(tensor), replace=True)
            elif (values := _floats(tensor)) is not None:
                self.order.setdefault(number)
                groups[values.device, values.dtype].append((number, values))
        for group in groups.values():
            numbers, tensors = zip(*group, strict=True)
            if tensors[0].device.type not in async_read.READABLE_DEVICES:
                norms = torch._foreach_norm(tensors, torch.inf)  # noqa: SLF001
                self.peaks += zip(numbers, norms, strict=True)
                continue
            dtype = _SUM_DTYPES[tensors[0].dtype]
            finite = _sum_is_finite(torch.stack([t.sum(dtype=dtype) for t in tensors]))
            for number, tensor in group:
                self.record(number, not finite and _is_nonfinite(tensor))

    def flags(self) -> tuple[list[int], list[Tensor]]:
        """Return indices, perhaps repeated, and their flags by dtype and device."""
        order, flags = list(self.nonfinite), []
        if self.nonfinite:
            flags.append(torch.tensor(list(self.nonfinite.values())))
        groups: defaultdict[object, list[tuple[int, Tensor]]] = defaultdict(list)
        for number, peak in self.peaks:
            groups[peak.device, peak.dtype].append((number, peak))
        for group in groups.values():
            order += [number for number, _ in group]
            flags.append(~torch.isfinite(torch.stack([peak for _, peak in group])))
        return order, flags

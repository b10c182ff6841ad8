"""What a probe has observed in one step: a flag for each name, or full statistics.

In: named tensors. Out: flags and statistics by name, on the device
until they are fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep._torch import async_read
from halfstep.numerics import formats
from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.tensor_counts import DTYPES, Counts, add_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.numerics.formats import FloatFormat

Key = tuple[int, str]
"""Number of a name, and the dtype observed under it."""
FlagOrStats = bool | Tensor | tuple[Counts, str] | None
"""What was measured of one tensor: whether it is not finite, or where the host
would have to wait a magnitude that says so, shape (); statistics and the dtype; None
of a tensor without floating numbers."""
_WORDS = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_SUMS = {dtype: dtype for dtype in DTYPES} | {torch.float16: torch.float32}
"""What is summed in."""


def numbers(tensor: Tensor) -> Tensor | None:
    """Return a tensor's numbers as plain floats; None of one that has none."""
    values = tensor.detach()
    # A nested tensor may call itself strided, and has no shape.
    plain = type(values) is Tensor and values.layout is torch.strided
    if not plain or values.is_nested:
        values = dense_values(values)
        values = values.values() if values.is_nested else values
    if values.dtype in DTYPES:
        return values if values.numel() else None
    if values.is_complex():
        return numbers(torch.view_as_real(values.resolve_conj()))
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Say whether `numbers` would return a tensor on a CPU as it is."""
    return (
        type(tensor) is Tensor
        and async_read.is_cpu(tensor.device)
        and tensor.dtype in _SUMS
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def non_finite(values: Tensor) -> bool:
    """Return whether there is an inf or a NaN, on a CPU.

    Why a sum: it takes a third of the time of both extremes, and is inf or NaN if a
    part is. Where it only overflowed, the extremes tell.
    """
    total: float = values.sum(dtype=_SUMS[values.dtype]).item()
    if total - total == 0:
        return False
    low, high = torch.aminmax(values)
    return not (bool(low.isfinite()) and bool(high.isfinite()))


class StepRecords:
    """Flags or statistics of the tensors observed since the last `clear`."""

    def __init__(self, casts: tuple[FloatFormat, ...], *, full: bool) -> None:
        """Take what to look for.

        Args:
            casts: Of the statistics.
            full: Take statistics; otherwise flags.
        """
        self._casts = casts
        self.full = full
        self.order: dict[int, None] = {}
        """Numbers of names in the order in which they were first observed."""
        self.nonfinite: dict[int, bool] = {}
        """Number of a name -> whether it was not finite."""
        self.peaks: list[tuple[int, Tensor]] = []
        """The same where the host would have to wait: magnitudes, shape ()."""
        self.rows: dict[Key, Counts] = {}

    def measure(self, tensor: Tensor) -> FlagOrStats:
        """Look at one tensor, of any dtype; only floating ones are read."""
        # The way of almost all, kept short: it lies between a model's operations.
        if not self.full and _is_plain(tensor):
            with torch._C._DisableAutocast():  # noqa: SLF001
                total: float = tensor.detach().sum(dtype=_SUMS[tensor.dtype]).item()
            if total - total == 0:
                return False if tensor.numel() else None
        values = numbers(tensor)
        if values is None:
            return None
        with torch._C._DisableAutocast():  # noqa: SLF001 -- it would cast first
            if self.full:
                counted = Counts.zeros(len(self._casts), values.device)
                add_(counted, values, self._casts)
                return counted, _WORDS[values.dtype]
            if async_read.is_cpu(values.device):
                return non_finite(values)
            # A GPU has one kernel for it, which is inf or NaN if one is there.
            peak: Tensor = torch.linalg.vector_norm(values, torch.inf)
            return peak

    def record(
        self, number: int, flag_or_stats: FlagOrStats, *, anew: bool = False
    ) -> None:
        """Record a flag or statistics under a name.

        Args:
            number: Of the name.
            flag_or_stats: By `found`.
            anew: Statistics replace those of the same name, and do not add to them.
        """
        self.order.setdefault(number)
        if isinstance(flag_or_stats, bool):
            self.nonfinite[number] = flag_or_stats or self.nonfinite.get(number, False)
        elif isinstance(flag_or_stats, Tensor):
            self.peaks.append((number, flag_or_stats))
        elif flag_or_stats is not None:
            counts, dtype = flag_or_stats
            before = None if anew else self.rows.get((number, dtype))
            self.rows[number, dtype] = counts if before is None else before.add(counts)

    @torch.no_grad()
    def measure_all(self, named: Sequence[tuple[int, Tensor]]) -> None:
        """Look at tensors that are all there; for flags, read one by one only at need.

        On a GPU by one kernel; on a CPU the host reads one number of each dtype.
        """
        groups: dict[object, list[tuple[int, Tensor]]] = {}
        for number, tensor in named:
            if self.full:
                self.record(number, self.measure(tensor), anew=True)
                continue
            values = tensor if _is_plain(tensor) else numbers(tensor)
            if values is not None:
                self.order.setdefault(number)
                at = values.device, values.dtype
                groups.setdefault(at, []).append((number, values))
        for group in groups.values():
            order, tensors = zip(*group, strict=True)
            if async_read.is_cpu(tensors[0].device):
                for number, flag in zip(order, _each(tensors), strict=True):
                    self.record(number, flag)
            else:
                norms = torch._foreach_norm(tensors, torch.inf)  # noqa: SLF001
                self.peaks += zip(order, norms, strict=True)

    def flags(self) -> tuple[list[int], list[Tensor]]:
        """Return numbers of names, perhaps twice, and as many flags.

        Returns:
            Numbers; rows of bool, one for each dtype and device, together as long.
        """
        order, rows = list(self.nonfinite), []
        if self.nonfinite:
            rows.append(torch.tensor(list(self.nonfinite.values())))
        groups: dict[object, list[tuple[int, Tensor]]] = {}
        for number, peak in self.peaks:
            groups.setdefault((peak.device, peak.dtype), []).append((number, peak))
        for group in groups.values():
            order += [number for number, _ in group]
            rows.append(~torch.isfinite(torch.stack([peak for _, peak in group])))
        return order, rows

    def clear(self) -> None:
        """Forget all."""
        self.order, self.nonfinite, self.peaks, self.rows = {}, {}, [], {}


def _each(tensors: Sequence[Tensor]) -> list[bool]:
    """Return of each tensor on a CPU, all of one dtype, whether it is not finite."""
    dtype = _SUMS[tensors[0].dtype]
    total: float = torch.stack([t.sum(dtype=dtype) for t in tensors]).sum().item()
    if total - total == 0:
        return [False] * len(tensors)
    return [non_finite(tensor) for tensor in tensors]


def label(name: str, dtype: str, first: str) -> str:
    """Return the name of statistics: with the dtype where another came by first."""
    return name if dtype == first else f"{name} ({formats.word(getattr(torch, dtype))})"

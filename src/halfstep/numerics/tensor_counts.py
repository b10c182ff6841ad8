"""Counts the exponents and special values of a tensor, and the losses of casts.

In: a floating-point tensor. Out: three small tensors on its device, computed in chunks,
without synchronization and without a wide copy of the whole. The counts of two tensors
can be added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from halfstep._torch import async_read
from halfstep.errors import UserError
from halfstep.numerics.exponents import BINS, bincount, count_exponents
from halfstep.numerics.formats import BF16, FP16, FloatFormat
from halfstep.numerics.local_tensor import dense_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CASTS = (FP16, BF16)
"""The 16-bit formats that training casts to."""

FACTS = ("count", "zeros", "subnormals", "infs", "nans")
"""Counted once per tensor, in this order, after the histogram."""
LOSSES = ("flushed", "subnormal", "saturated")
"""Counted for each cast, in this order, after the facts."""

LARGEST = 2.0**480
"""Magnitudes are clamped to this in sums of squares, which would overflow fp64. It
affects only fp64 tensors."""

_CHUNK_NUMEL = {True: 2**16, False: 2**22}
"""Elements per chunk. On a CPU a chunk and its fp64 copies fit into a core's cache; on
a device a chunk is large enough to use it fully."""
_CHUNK_NUMEL_16BIT = 2**20  # for 16-bit tensors
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Supported dtypes; complex tensors are viewed as real."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}


@dataclass(frozen=True)
class Counts:
    """Counts as tensors on the device; `add_` writes to them."""

    counts: Tensor
    """int64: the histogram of `count_exponents`, then `FACTS`, then `LOSSES` of each
    cast."""
    sums: Tensor
    """float64: the sum of squares of all finite values, then, for each cast, that of
    the errors. A value that overflows counts as the format's largest number."""
    extremes: Tensor
    """float64: the largest finite magnitude, at least 0; minus the smallest non-zero
    magnitude, -inf if there is none."""

    @classmethod
    def zeros(cls, casts: int, device: torch.device) -> Counts:
        """Return empty counts for a number of casts."""
        width = BINS + len(FACTS) + casts * len(LOSSES)
        extremes = torch.zeros(2, dtype=torch.float64, device=device)
        extremes[1].fill_(-torch.inf)
        counts = torch.zeros(width, dtype=torch.int64, device=device)
        sums = torch.zeros(1 + casts, dtype=torch.float64, device=device)
        return cls(counts, sums, extremes)

    def add(self, other: Counts) -> Counts:
        """Return the sum of both counts; neither is modified."""
        at = self.counts.device
        return Counts(
            self.counts + other.counts.to(at),
            self.sums + other.sums.to(at),
            torch.maximum(self.extremes, other.extremes.to(at)),
        )

    @classmethod
    def stacked(cls, rows: Sequence[Counts]) -> Counts:
        """Stack one or more counts, on the device of the first."""
        at = rows[0].counts.device
        columns = zip(*(vars(row).values() for row in rows), strict=True)
        return cls(*(torch.stack([part.to(at) for part in each]) for each in columns))

    def rows(self) -> list[Counts]:
        """Return the stacked counts."""
        parts = (self.counts.unbind(), self.sums.unbind(), self.extremes.unbind())
        return [Counts(*row) for row in zip(*parts, strict=True)]

    def has_nonfinite(self) -> Tensor:
        """Return whether there are infs or NaNs: bool, one per row."""
        first = BINS + FACTS.index("infs")
        return self.counts[..., first : first + 2].sum(-1) > 0


@torch.no_grad()
def add_(into: Counts, tensor: Tensor, casts: tuple[FloatFormat, ...]) -> None:
    """Add a tensor's values to the counts, in place: see `tensor_stats.measure`.

    `into` must be on the tensor's device and have as many casts.
    """
    values = _flat(tensor)
    if values.element_size() == 2:  # noqa: PLR2004
        _add_16bit(into, values, casts)
    else:
        size = _CHUNK_NUMEL[values.device.type in async_read.READABLE_DEVICES]
        for piece in torch.split(values, size):
            _add_chunk(into, piece, casts)


def _flat(tensor: Tensor) -> Tensor:
    """Return the values as 1-D in memory order; only tensors with gaps are copied."""
    values = dense_values(tensor.detach()).resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype not in DTYPES:
        raise UserError(
            f"a tensor of {values.dtype} has no statistics; give one of float16, "
            "bfloat16, float32 or float64."
        )
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


# 32 and 64 bits: several passes over a chunk


def _add_chunk(into: Counts, chunk: Tensor, casts: tuple[FloatFormat, ...]) -> None:
    """Add a chunk, using that positive floats are ordered like their bits."""
    if not chunk.numel():
        return
    bits_of = _INTEGERS[chunk.element_size()]
    most = torch.iinfo(bits_of).max
    inf = most - 2 ** _MANTISSA[chunk.dtype] + 1
    size = chunk.abs()
    values = torch.nan_to_num(size, nan=0.0, posinf=0.0)
    finite = values.view(bits_of)
    histogram = count_exponents(values)
    some, nonzero = (
        torch.count_nonzero(size),
        torch.count_nonzero(finite),
    )  # NaN is some
    numbers = torch.count_nonzero(torch.nan_to_num_(size, nan=0.0))
    histogram[0] -= some - nonzero
    histogram[-1] += some - nonzero
    facts = [chunk.numel() - some, _subnormals(values, histogram, nonzero)]
    facts += [numbers - nonzero, some - numbers]
    # Minus 1, zero wraps to the largest integer and is never the smallest.
    least = (finite - 1).bitwise_and_(most).amin()
    lowest = (least + 1).clamp(max=inf - 1).view(chunk.dtype).double()
    lowest = torch.where(least < most, lowest, torch.inf)
    largest = finite.amax().view(chunk.dtype).double()
    losses, errors = [], []
    for form in casts:
        lost, error = _cast(values, form, nonzero)
        losses += lost
        errors.append(error)
    into.counts[:BINS] += histogram
    into.counts[BINS] += chunk.numel()
    into.counts[BINS + 1 :] += torch.stack([*facts, *losses])
    into.sums.add_(torch.stack([_square(values), *errors]))
    torch.maximum(into.extremes, torch.stack([largest, -lowest]), out=into.extremes)


def _subnormals(values: Tensor, histogram: Tensor, nonzero: Tensor) -> Tensor:
    tiny = torch.finfo(values.dtype).smallest_normal
    if values.dtype == torch.float64:  # fp64's subnormals have no bins
        return torch.count_nonzero(values < tiny) - (values.numel() - nonzero)
    return histogram[1 : int(math.log2(tiny)) + (BINS // 2 - 1)].sum()


def _cast(
    values: Tensor, form: FloatFormat, nonzero: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return `LOSSES` and the sum of squared errors of a cast of magnitudes."""
    low = values.to(form.dtype)
    bits = low.view(_INTEGERS[form.bytes])
    num_nonzero = torch.count_nonzero(bits)
    fields = bincount(bits >> form.mantissa_bits, 2**form.exponent_bits)
    subnormal = fields[0] - (values.numel() - num_nonzero)
    flushed, saturated = nonzero - num_nonzero, fields[-1]
    back = low.to(values.dtype).clamp_(max=form.max)
    return [flushed, subnormal, saturated], _square(values - back)


def _square(values: Tensor) -> Tensor:
    wide = values.double()
    if values.dtype == torch.float64:
        wide = wide.clamp(-LARGEST, LARGEST)
    return torch.dot(wide, wide)


# 16 bits: count each of the 32,768 magnitudes


@cache
def _magnitudes(
    dtype: torch.dtype, casts: tuple[FloatFormat, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the bits 0 to 32,767, the value, the bin of its exponent, and facts.

    The value is float64, zero if not finite. The facts are float64, a column of 0 and 1
    for each of `FACTS` and of the `LOSSES` of each cast; then the squares of the value
    and of the errors of each cast.
    """
    bits = torch.arange(2**15, dtype=torch.int16)
    every = bits.view(dtype)
    wide = every.float()
    finite = wide.isfinite()
    values = torch.where(finite, wide, 0.0)
    nonzero = values > 0
    small = nonzero & (wide < torch.finfo(dtype).smallest_normal)
    columns = [torch.ones_like(finite), wide == 0, small, wide.isinf(), wide.isnan()]
    squares = [values.double().square()]
    for form in casts:
        low = values.to(form.dtype)
        subnormal = (low > 0) & (low < form.min_normal)
        columns += [nonzero & (low == 0), subnormal, low.isinf()]
        errors = values - low.float().clamp(max=form.max)
        squares.append(errors.double().square())
    field = (wide.double().view(torch.int64) >> 52) & (BINS - 1)
    facts = torch.stack([*(column.double() for column in columns), *squares], 1)
    return values.double().to(device), field.to(device), facts.to(device)


def _add_16bit(into: Counts, values: Tensor, casts: tuple[FloatFormat, ...]) -> None:
    """Add a 16-bit tensor by how often each magnitude occurs."""
    magnitudes, bins, columns = _magnitudes(values.dtype, casts, values.device)
    frequencies = torch.zeros(2**15, dtype=torch.int64, device=values.device)
    for piece in torch.split(values.view(torch.int16), _CHUNK_NUMEL_16BIT):
        frequencies += bincount(piece & (2**15 - 1), len(frequencies))
    into.counts[:BINS].scatter_add_(0, bins, frequencies)
    sums = frequencies.double() @ columns  # exact: counts are far below 2**53
    facts = len(FACTS) + len(LOSSES) * len(casts)
    into.counts[BINS:] += sums[:facts].long()
    into.sums.add_(sums[facts:])
    present = torch.where(frequencies > 0, magnitudes, 0.0)
    lowest = torch.where(present > 0, present, torch.inf).amin()
    extremes = torch.stack([present.amax(), -lowest])
    torch.maximum(into.extremes, extremes, out=into.extremes)

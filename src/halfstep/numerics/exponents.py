"""Histograms of exponents, computed without host-device synchronization."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from halfstep._torch import async_read
from halfstep.numerics.formats import parse
from halfstep.numerics.local_tensor import local_values

if TYPE_CHECKING:
    from torch import Tensor

BINS = 2048
"""One bin per exponent of fp64: bin b counts magnitudes in [2**(b - 1023), 2**(b -
1022)). Bin 0 counts zeros, the last bin inf and NaN."""

_BIAS = 1023
_CHUNK_NUMEL = 2**20  # Elements widened at a time, 8 MB of fp64


@torch.no_grad()
def count_exponents(tensor: Tensor) -> Tensor:
    """Return the histogram of a tensor's exponents, without unscaling.

    Why not log2: it is wrong next to powers of two. In fp64 all values of the smaller
    formats are normal, including their subnormals, so the exponent is a bit field.
    fp64's own subnormals count as zeros: no fp32 scale makes them relevant. The result
    is int64, shape (BINS,), on the tensor's device.
    """
    flat = local_values(tensor).flatten()
    histogram = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    for piece in torch.split(flat, _CHUNK_NUMEL):
        histogram += bincount(_exponent_field(piece), BINS)
    return histogram


def bincount(numbers: Tensor, bins: int) -> Tensor:
    """Count each integer from 0 to `bins` - 1, without synchronization.

    Why: `torch.bincount` reads the maximum on the host. On a CPU that does not
    synchronize, and takes a half to a sixth of the time of `scatter_add_`.
    """
    if numbers.device.type in async_read.READABLE_DEVICES:
        return torch.bincount(numbers, minlength=bins)
    one = torch.ones((), dtype=torch.int64, device=numbers.device)
    counts = torch.zeros(bins, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers.long(), one.expand_as(numbers))


def _exponent_field(values: Tensor) -> Tensor:
    """Return the exponent field of fp64: 0 for zeros, 2047 for inf and NaN."""
    return (values.double().view(torch.int64) >> 52) & (BINS - 1)


def unscale_histogram(histogram: Tensor, scale: Tensor) -> Tensor:
    """Return the histogram of the values divided by `scale`, shape ()."""
    bins = torch.arange(BINS, device=histogram.device)
    target = (bins - (_exponent_field(scale) - _BIAS)).clamp(1, BINS - 2)
    target = torch.where((bins == 0) | (bins == BINS - 1), bins, target)
    return torch.zeros_like(histogram).scatter_add_(0, target, histogram)


def largest_safe_scale(
    histogram: Tensor, low_dtype: torch.dtype = torch.float16, margin: int = 1
) -> Tensor:
    """Return the largest power of two as loss scale at which no value overflows.

    Formula: 2**(top - e - margin), with e the highest exponent in the histogram, and
    top that of the format's largest number (fp16: 15).

    Args:
        histogram: Histogram of unscaled values.
        low_dtype: Format of the scaled values.
        margin: Powers of two of safety, >= 0. With 0, a value may end up between the
            largest number and the next power of two, and overflow; with 1, all values
            are below half the largest number, so the next batch may be twice as large.

    Returns:
        float32, shape (), clamped to 2**-126..2**127; NaN if the histogram has no
        finite non-zero values.
    """
    top = math.frexp(torch.finfo(low_dtype).max)[1] - 1
    seen = histogram[1:-1] > 0
    bins = torch.arange(1, BINS - 1, device=histogram.device)
    highest = torch.where(seen, bins - _BIAS, -_BIAS).amax()
    return torch.where(seen.any(), power_of_two(top - margin - highest), torch.nan)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, exactly; the exponent is clamped to fp32's range.

    Why: exp2 and pow on a GPU need not be exact, and a scale that is not a power of two
    rounds every value it multiplies.
    """
    bits = (exponent.clamp(-126, 127).to(torch.int32) + 127) << 23
    return bits.view(torch.float32)


def flushed_share(
    histogram: Tensor, scale: Tensor, low_dtype: torch.dtype = torch.float16
) -> Tensor:
    """Return the share of non-zero values that a format flushes to zero at a scale.

    Values below half the format's smallest number are flushed. Exactly half is flushed
    too, but not counted, because it shares a bin with larger values. The histogram is
    of unscaled values; the scale is a power of two, shape (). The result is float32,
    shape (); 0 if the histogram is empty.
    """
    lowest = _exponent(parse(low_dtype).min_subnormal) - 1
    return _share_between(histogram, scale, -math.inf, lowest)


def subnormal_share(
    histogram: Tensor, scale: Tensor, low_dtype: torch.dtype = torch.float16
) -> Tensor:
    """Return the share of non-zero values that become subnormal at a scale.

    They are not flushed to zero, but lose bits. Arguments as for `flushed_share`.
    """
    format_ = parse(low_dtype)
    lowest, normal = _exponent(format_.min_subnormal) - 1, _exponent(format_.min_normal)
    return _share_between(histogram, scale, lowest, normal)


def _exponent(power: float) -> int:
    return math.frexp(power)[1] - 1


def _share_between(
    histogram: Tensor, scale: Tensor, start: float, end: float
) -> Tensor:
    """Return the share of values whose scaled exponent is in [start, end)."""
    counts = histogram[1:-1]
    bins = torch.arange(1, BINS - 1, device=histogram.device)
    scaled = bins - _BIAS + _exponent_field(scale) - _BIAS
    within = (scaled >= start) & (scaled < end)
    return (counts * within).sum() / counts.sum().clamp(min=1)

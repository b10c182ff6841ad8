"""Histograms of exponents, counted without host-device synchronization."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from halfstep._torch import async_read
from halfstep.numerics.formats import parse
from halfstep.numerics.local_tensor import local_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BINS = 2048
"""One for each exponent of fp64: bin b counts the numbers from 2**(b - 1023) up to
twice that. Bin 0 counts zeros, the last one inf and NaN."""

_BIAS = 1023
_CHUNK_NUMEL = 2**20  # Numbers widened at a time: 8 MB, not four times the tensor.


@torch.no_grad()
def count_exponents(tensor: Tensor) -> Tensor:
    """Count a tensor's numbers by their exponents, as they are.

    Why: log2 is wrong next to powers of two. In fp64 every number of the other formats
    is normal, subnormal ones too, so that the exponent is a field of its bits. fp64's
    own subnormal numbers count as zeros: no scale in fp32 makes anything of them.

    Returns:
        int64, shape (BINS,), on the tensor's device.
    """
    flat = local_values(tensor).flatten()
    histogram = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    for piece in torch.split(flat, _CHUNK_NUMEL):
        histogram += bincount(_exponent_field(piece), BINS)
    return histogram


def bincount(numbers: Tensor, bins: int) -> Tensor:
    """Count how often each integer from 0 to below `bins` is there, without waiting.

    Why: `torch.bincount` reads the largest number on the host. On a CPU alone that is
    no wait, and takes a half to a sixth of the time.
    """
    if async_read.is_cpu(numbers.device):
        return torch.bincount(numbers, minlength=bins)
    one = torch.ones((), dtype=torch.int64, device=numbers.device)
    counts = torch.zeros(bins, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers.long(), one.expand_as(numbers))


def _exponent_field(values: Tensor) -> Tensor:
    """Return the exponent field of fp64: 0 for zeros, 2047 for inf and NaN."""
    return (values.double().view(torch.int64) >> 52) & (BINS - 1)


def largest_magnitude(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the largest absolute value, in the dtype and on the device of `like`.

    Why: a GPU has one fused kernel for the norms of a list. A CPU takes several times
    as long for such a norm as for both extremes.

    Returns:
        Shape (); 0 of no numbers, NaN or inf if one is there.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        values = local_values(tensor).detach()
        if values.numel():
            groups[values.device, values.dtype].append(values)
    tops = [torch.zeros_like(like)]
    for (device, _), group in groups.items():
        if device.type == "cpu":
            ends = [end for values in group for end in torch.aminmax(values)]
        else:
            ends = list(torch._foreach_norm(group, torch.inf))  # noqa: SLF001
        tops.append(torch.stack(ends).abs().amax().to(like))
    return torch.stack(tops).amax()


def unscale_histogram(histogram: Tensor, scale: Tensor) -> Tensor:
    """Return the histogram of the same numbers divided by `scale`, shape ()."""
    bins = torch.arange(BINS, device=histogram.device)
    target = (bins - (_exponent_field(scale) - _BIAS)).clamp(1, BINS - 2)
    target = torch.where((bins == 0) | (bins == BINS - 1), bins, target)
    return torch.zeros_like(histogram).scatter_add_(0, target, histogram)


def largest_safe_scale(
    histogram: Tensor, low_dtype: torch.dtype = torch.float16, margin: int = 1
) -> Tensor:
    """Return the largest power of two that none of the numbers overflows at.

    Formula: 2**(top - e - margin), with e the highest exponent seen, and top that of
    the format's largest number (fp16: 15).

    Args:
        histogram: Of unscaled numbers.
        low_dtype: The format that must hold them, scaled.
        margin: Powers of two to stay away, >= 0. At 0 a number may come to lie between
            the largest one and the next power of two, and overflow; at 1 all lie below
            half the largest, so that the next batch may be twice as large.

    Returns:
        float32, shape (); NaN if no finite number other than zero was seen. At least
        2**-126 and at most 2**127, which fp32 holds.
    """
    top = math.frexp(torch.finfo(low_dtype).max)[1] - 1
    seen = histogram[1:-1] > 0
    bins = torch.arange(1, BINS - 1, device=histogram.device)
    highest = torch.where(seen, bins - _BIAS, -_BIAS).amax()
    return torch.where(seen.any(), power_of_two(top - margin - highest), torch.nan)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, exactly; exponents that it has not are clamped.

    Why: exp2 and pow of a GPU need not be exact, and a scale that is no power of two
    rounds whatever it multiplies.
    """
    bits = (exponent.clamp(-126, 127).to(torch.int32) + 127) << 23
    return bits.view(torch.float32)


def flushed_share(
    histogram: Tensor, scale: Tensor, low_dtype: torch.dtype = torch.float16
) -> Tensor:
    """Return which share of the numbers other than zero becomes zero at a scale.

    Those below half the format's smallest number do. That half itself does as well, but
    shares a bin with its betters, and is not counted. The histogram is of unscaled
    numbers, the scale a power of two, shape ().

    Returns:
        float32, shape (), from 0 to 1; 0 if nothing was seen.
    """
    return _share_between(
        histogram, scale, -math.inf, _exponent(parse(low_dtype).min_subnormal) - 1
    )


def subnormal_share(
    histogram: Tensor, scale: Tensor, low_dtype: torch.dtype = torch.float16
) -> Tensor:
    """Return which share of the numbers other than zero loses bits at a scale.

    They lie between what becomes zero and the format's smallest normal number. As for
    `flushed_share`.
    """
    format_ = parse(low_dtype)
    lowest, normal = _exponent(format_.min_subnormal) - 1, _exponent(format_.min_normal)
    return _share_between(histogram, scale, lowest, normal)


def _exponent(power: float) -> int:
    return math.frexp(power)[1] - 1


def _share_between(
    histogram: Tensor, scale: Tensor, start: float, end: float
) -> Tensor:
    """Return the share whose exponent, scaled, is at least `start` and below `end`."""
    counts = histogram[1:-1]
    bins = torch.arange(1, BINS - 1, device=histogram.device)
    scaled = bins - _BIAS + _exponent_field(scale) - _BIAS
    within = (scaled >= start) & (scaled < end)
    return (counts * within).sum() / counts.sum().clamp(min=1)

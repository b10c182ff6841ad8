"""Encodes fp32 as a bf16 weight plus 16 more bits (split, kahan) or none (stochastic).

split stores the low 16 bits of the fp32 value (exact), kahan a bf16 compensation term;
stochastic stores only the bf16 weight. All codecs use integer arithmetic, because
compilers remove casts to bf16 and back. On CPUs one sum checks that a tensor is finite;
inf and NaN are handled only if it is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

INFINITE = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
QUIET = 0x40
"""Quiet bit of bf16: setting it keeps a truncated NaN from becoming infinity."""

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_LARGEST = 0x7F7F
"""The largest finite bf16."""


@torch.no_grad()
def split_encode_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split fp32 into the nearest bf16, ties away from zero, and the low 16 bits.

    A finite master of 0x7F7F8000 or more (beyond the largest bf16) gives an infinite
    weight, but still decodes exactly. NaN gives NaN in both.
    """
    bits = master.view(torch.int32)
    # Sign-extend, so that the conversion to int16 is exact and does not wrap.
    remainder.copy_((bits << 16).bitwise_right_shift_(16))
    high = (bits + 0x8000).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(_keep_nan(master, high))


@torch.no_grad()
def split_decode_(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Decode fp32 master weights exactly, except for the payload of NaN.

    A NaN keeps its sign and its low half, and gets bit 22 set. Code that sets weights
    to zero leaves zeros with a negative remainder, which no master encodes to; these
    decode to less than 2**-133 instead of the NaN that the formula would give.
    """
    if master.is_cpu:
        bits = master.view(torch.int32)
        bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
        # A negative remainder borrows 1 from the high half; a zero would become NaN.
        bits.add_(remainder)
        if _all_finite(master):
            return
    high = weight.view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    magnitude = high & 0x7FFF
    # Encoding can round up only to these magnitudes: not to zero, and not to NaN.
    rounded_up = (low < 0) & (magnitude > 0) & (magnitude <= INFINITE >> 16)
    bits = ((high - rounded_up.to(torch.int32)) << 16) | (low & 0xFFFF)
    master.view(torch.int32).copy_(bits)


@torch.no_grad()
def kahan_encode_(master: Tensor, weight: Tensor, compensation: Tensor) -> None:
    """Split fp32 into a bf16 weight and a bf16 compensation term.

    `kahan_decode_` returns the master with a relative error of at most 2**-17: for 2**e
    <= |master| < 2**(e+1), weight and master differ by at most half an ulp of bf16,
    2**(e-8), and fp32 represents that difference exactly. Rounding it to 8 significant
    bits loses at most 2**(e-8) * 2**-9. Below 2**-117 the bound is 2**-134, as bf16
    ends at 2**-133. The compensation is 0 where the weight is not finite.
    """
    high = _nearest(master)
    weight.view(torch.int16).copy_(high)
    rounded = high.bitwise_left_shift_(16).view(torch.float32)
    missing = master - rounded
    low = _nearest(missing)
    if not _all_finite(missing):
        low = torch.where(weight.isfinite(), low, 0)
    compensation.view(torch.int16).copy_(low)


@torch.no_grad()
def kahan_decode_(weight: Tensor, compensation: Tensor, master: Tensor) -> None:
    """Add weight and compensation in fp32, without rounding error; -0.0 becomes 0.0."""
    master.copy_(weight).add_(compensation.float())


@torch.no_grad()
def stochastic_round_(values: Tensor, out: Tensor, random_bits: Tensor) -> None:
    """Round fp32 to bf16 stochastically, with 16 random bits per element.

    A value is rounded up in magnitude if the low half of its bits plus the random bits
    overflows: with probability low half / 65536, its distance to the lower neighbor in
    ulps. A finite value never becomes infinite, infinities and NaN are kept, and NaN
    keeps its sign. `random_bits` is int32 in [0, 65536), one per value, in the same
    order.
    """
    bits, random_bits = values.view(torch.int32), random_bits.view(values.shape)
    if _all_finite(values):
        word = (bits + random_bits).bitwise_right_shift_(16)
        out.view(torch.int16).copy_(word)
        if _all_finite(out):
            return
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + random_bits) >> 16
    # Never round up to infinity, nor change infinity or NaN.
    round_up = torch.where((high & 0x7FFF) < _LARGEST, round_up, 0)
    out.view(torch.int16).copy_(_keep_nan(values, high + round_up))


def key(seed: int, step: int, index: int, stream: int) -> tuple[int, int]:
    """Return two 32-bit words that seed the random bits of one tensor.

    All arguments are taken modulo 2**64. `stream` is 0 for the weight and the first
    optimizer state, 1 for the other two states.
    """
    mixed = 0
    for number in (seed, step, index, stream):
        mixed = splitmix(mixed ^ (number & _LONG))
    return mixed & _WORD, mixed >> 32


def splitmix(state: int) -> int:
    """Return splitmix64 of a 64-bit state; a bijection.

    References:
        Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    mixed = (state + 0x9E3779B97F4A7C15) & _LONG
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _LONG
    return mixed ^ (mixed >> 31)


def mix(words: Tensor) -> Tensor:
    """Hash 32-bit words; a bijection.

    Why int64, as the result: int32 products that overflow are undefined in C++, and
    compilers exploit that. A 32-bit word times a constant below 2**31 is below 2**63.

    References:
        github.com/skeeto/hash-prospector, where the constants were searched for.
    """
    mixed = words ^ (words >> 16)
    mixed.mul_(0x21F0AAAD).bitwise_and_(_WORD)
    mixed.bitwise_xor_(mixed >> 15)
    mixed.mul_(0x735A2D97).bitwise_and_(_WORD)
    return mixed.bitwise_xor_(mixed >> 15)


def random_bits16(
    words: tuple[int, int],
    numel: int,
    device: torch.device | str,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return two int32 tensors of random integers in [0, 65536), shape (numel,).

    `words` are from `key`. `start` is the index of the first element, modulo 2**32;
    chunks of a tensor get the same random bits as the whole tensor.
    """
    end = start + numel
    counted = torch.arange(start, end, dtype=torch.int64, device=device)
    mixed = mix(counted.add_(words[0]).bitwise_and_(_WORD))
    mixed = mix(mixed.bitwise_xor_(words[1]))
    return (mixed >> 16).to(torch.int32), (mixed & 0xFFFF).to(torch.int32)


def _nearest(values: Tensor) -> Tensor:
    """Round fp32 to bf16, ties to even; return the bits as sign-extended int32.

    NaN keeps its sign on every device.
    """
    bits = values.view(torch.int32)
    word = (bits >> 16).bitwise_and_(1).add_(bits).add_(0x7FFF)
    word.bitwise_right_shift_(16)
    return _keep_nan(values, word)


def _keep_nan(values: Tensor, rounded: Tensor) -> Tensor:
    """Return the bf16 bits in `rounded`, with NaN wherever `values` is NaN.

    Why: rounding up turns some NaN into zero, and truncation turns others into
    infinity; the model would look healthy.
    """
    if _all_finite(values):
        return rounded
    bits = values.view(torch.int32)
    is_nan = (bits & MAGNITUDE) > INFINITE
    return torch.where(is_nan, (bits >> 16) | QUIET, rounded)


def _all_finite(values: Tensor) -> bool:
    """Return whether all values are finite; False on devices, to avoid synchronization.

    A finite tensor whose sum overflows also gives False, which only costs time.
    """
    return values.is_cpu and bool(torch.isfinite(values.sum()))

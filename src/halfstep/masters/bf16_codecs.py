"""Codecs of compact master weights: fp32 as a bf16 weight and 16 bits beside it, or 0.

In: fp32 tensors. Out: split (bf16 and the low 16 bits, exact), kahan (bf16 and a bf16
compensation term) and stochastic rounding (bf16 alone), and fp32 again. All in
integers: compilers drop casts to bf16 and back. On a CPU one sum says whether a tensor
is finite; only otherwise does it pay for the handling of inf and NaN.
"""

from __future__ import annotations

from threading import local

import torch
from torch import Tensor

INFINITE = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
QUIET = 0x40
"""The bit of a bf16 that makes it NaN whatever its other fraction bits are."""

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_LARGEST = 0x7F7F
"""The largest finite bf16."""
_MIN_SCRATCH = 4096
_MAX_SCRATCH = 1 << 16
"""As many as a chunk of the eager kernels holds on a CPU; larger ones are freed."""


class Scratch(local):
    """Buffers that are reused from call to call; each thread has its own."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(
        self, name: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer of a name, for so many numbers."""
        key = (name, dtype, device)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            # A small model should not pay for a whole chunk.
            size = max(_MIN_SCRATCH, 1 << (numel - 1).bit_length())
            # An inference tensor could not be written outside of inference mode.
            with torch.inference_mode(mode=False):
                buffer = torch.empty(size, dtype=dtype, device=device)
            self.buffers[key] = buffer
        return buffer[:numel]


scratch = Scratch()


@torch.no_grad()
def split_encode_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split fp32 into the nearest bf16, ties away from zero, and the low 16 bits.

    A finite master of 0x7F7F8000 or more, beyond the largest bf16, gives an infinite
    weight, and decodes exactly all the same. NaN gives NaN in both.
    """
    bits = master.view(torch.int32)
    # Sign-extended here, so that the conversion to int16 is exact and need not wrap.
    word = torch.bitwise_left_shift(bits, 16, out=_int32_like(master))
    remainder.copy_(word.bitwise_right_shift_(16))
    high = torch.add(bits, 0x8000, out=word).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(_keep_nan(master, high))


@torch.no_grad()
def split_decode_(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Decode a master: every bit of it, but for the payload of a NaN.

    A NaN comes back with the sign and the low half it had, and bit 22 set. A zero with
    a negative remainder, which no master gives, is what code that sets weights to zero
    leaves behind: it decodes to less than 2**-133, not to the NaN that the formula
    makes of it.
    """
    if master.is_cpu:
        bits = master.view(torch.int32)
        bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
        # Borrows one from the high half where the remainder is negative, which makes
        # NaN of zero.
        bits.add_(_int32_like(master).copy_(remainder))
        if _all_finite(master):
            return
    high = weight.view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    magnitude = high & 0x7FFF
    # Only these were ever carried into: not zero, and not NaN.
    rounded_up = (low < 0) & (magnitude > 0) & (magnitude <= INFINITE >> 16)
    bits = ((high - rounded_up.to(torch.int32)) << 16) | (low & 0xFFFF)
    master.view(torch.int32).copy_(bits)


@torch.no_grad()
def kahan_encode_(master: Tensor, weight: Tensor, compensation: Tensor) -> None:
    """Split a master; what `kahan_decode_` returns is off by at most 2**-17 of it.

    With 2**e <= |master| < 2**(e+1), weight and master differ by at most half an ulp of
    bf16, 2**(e-8), and fp32 holds that difference exactly. It is rounded to 8
    significant bits: at most 2**(e-8) * 2**-9 is lost. bf16 ends at 2**-133, so at most
    2**-134 is lost where that is more, below 2**-117. The compensation is 0 where the
    weight is not finite.
    """
    high = _nearest(master)
    weight.view(torch.int16).copy_(high)
    rounded = high.bitwise_left_shift_(16).view(torch.float32)
    missing = torch.sub(master, rounded, out=_scratch_like("missing", master))
    low = _nearest(missing)
    if not _all_finite(missing):
        low = torch.where(weight.isfinite(), low, 0)
    compensation.view(torch.int16).copy_(low)


@torch.no_grad()
def kahan_decode_(weight: Tensor, compensation: Tensor, master: Tensor) -> None:
    """Add the two in fp32, exact for what `kahan_encode_` wrote; -0.0 becomes 0.0."""
    missing = _scratch_like("missing", master)
    master.copy_(weight).add_(missing.copy_(compensation))


@torch.no_grad()
def stochastic_round_(values: Tensor, out: Tensor, random_bits: Tensor) -> None:
    """Round up in magnitude where the low half of the bits and the draw overflow.

    The chance of it is low half / 65536, the distance to the lower neighbour in ulps.
    What is beyond the largest bf16 stays there: no draw makes an infinity. Infinities
    and NaN stay what they are, and a NaN keeps its sign. `random_bits` are int32 in
    [0, 65536), as many as there are values, in their order.
    """
    bits, random_bits = values.view(torch.int32), random_bits.view(values.shape)
    if _all_finite(values):
        word = torch.add(bits, random_bits, out=_int32_like(values))
        out.view(torch.int16).copy_(word.bitwise_right_shift_(16))
        if _all_finite(out):
            return
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + random_bits) >> 16
    # Not carried into infinity, and neither from infinity nor NaN.
    round_up = torch.where((high & 0x7FFF) < _LARGEST, round_up, 0)
    out.view(torch.int16).copy_(_keep_nan(values, high + round_up))


def key(seed: int, step: int, index: int, stream: int) -> tuple[int, int]:
    """Return the two 32-bit words that the random numbers of one tensor start from.

    All four are taken modulo 2**64; `stream` is 0 for the weight and the first state, 1
    for the other two states.
    """
    mixed = 0
    for number in (seed, step, index, stream):
        mixed = splitmix(mixed ^ (number & _LONG))
    return mixed & _WORD, mixed >> 32


def splitmix(state: int) -> int:
    """Return the number that splitmix64 draws from a state; one to one on 64 bits.

    References:
        Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    mixed = (state + 0x9E3779B97F4A7C15) & _LONG
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _LONG
    return mixed ^ (mixed >> 31)


def mix(words: Tensor) -> Tensor:
    """Scramble 32-bit words, one to one.

    Why int64: a product of int32 that overflows is undefined in C++, and compilers make
    use of that. A word times a constant below 2**31 is below 2**63.

    Args:
        words: int64 in [0, 2**32), as is what is returned.

    References:
        github.com/skeeto/hash-prospector, where the constants were searched for.
    """
    mixed = words ^ (words >> 16)
    mixed.mul_(0x21F0AAAD).bitwise_and_(_WORD)
    mixed.bitwise_xor_(mixed >> 15)
    mixed.mul_(0x735A2D97).bitwise_and_(_WORD)
    return mixed.bitwise_xor_(mixed >> 15)


def random_bits16(
    words: tuple[int | Tensor, int | Tensor],
    numel: int,
    device: torch.device | str,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return two tensors of random integers in [0, 65536), int32, shape (numel,).

    Args:
        words: From `key`; or two tensors of such words, one for each number.
        numel: How many.
        device: Where.
        start: Number of the first element, taken modulo 2**32; a tensor in chunks draws
            what it draws whole.
    """
    end = start + numel
    counted = torch.arange(start, end, dtype=torch.int64, device=device)
    mixed = mix(counted.add_(words[0]).bitwise_and_(_WORD))
    mixed = mix(mixed.bitwise_xor_(words[1]))
    return (mixed >> 16).to(torch.int32), (mixed & 0xFFFF).to(torch.int32)


def _nearest(values: Tensor) -> Tensor:
    """Round fp32 to bf16, ties to even, as bits in int32, sign-extended, in scratch.

    A NaN keeps its sign, on every device.
    """
    bits = values.view(torch.int32)
    word = torch.bitwise_right_shift(bits, 16, out=_int32_like(values))
    word.bitwise_and_(1).add_(bits).add_(0x7FFF).bitwise_right_shift_(16)
    return _keep_nan(values, word)


def _keep_nan(values: Tensor, rounded: Tensor) -> Tensor:
    """Return the bf16 bits of rounded values, with NaN where there was NaN.

    Why: a carry makes zero of some NaN, and cutting the low half makes infinity of
    others; a model with such a weight looks healthy.
    """
    if _all_finite(values):
        return rounded
    bits = values.view(torch.int32)
    is_nan = (bits & MAGNITUDE) > INFINITE
    return torch.where(is_nan, (bits >> 16) | QUIET, rounded)


def _all_finite(values: Tensor) -> bool:
    """Say that all are finite; a sum that overflows says no, which costs time alone.

    Never on a device, where the answer would synchronize with the host.
    """
    return values.is_cpu and bool(torch.isfinite(values.sum()))


def _scratch_like(
    name: str, like: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    if like.numel() > _MAX_SCRATCH or not like.is_contiguous():
        return torch.empty_like(like, dtype=dtype)
    return scratch(name, like.numel(), dtype, like.device).view(like.shape)


def _int32_like(values: Tensor) -> Tensor:
    return _scratch_like("word", values, torch.int32)

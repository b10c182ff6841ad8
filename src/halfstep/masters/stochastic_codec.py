"""Stochastic rounding from fp32 to bf16, from random numbers that need no state.

In: fp32 values and 16 random bits for each. Out: one of the two bf16 around each, the
value on average. The bits depend on the seed, the step, the parameter and the element
alone, so every rank draws the same ones, and a resumed run goes on where it stopped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.masters.split_codec import keep_nan

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_LARGEST = 0x7F7F
"""The largest finite bf16."""


def key(seed: int, step: int, index: int, stream: int) -> tuple[int, int]:
    """Return the two 32-bit words that the random numbers of one tensor start from.

    Args:
        seed: Of the run; any integer, taken modulo 2**64 like the other three.
        step: Of the optimizer.
        index: Of the parameter.
        stream: 0 for the weight and the first state, 1 for the other two states.
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
    words: tuple[int, int],
    numel: int,
    device: torch.device | str,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return two tensors of random integers in [0, 65536), int32, shape (numel,).

    Args:
        words: From `key`.
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


@torch.no_grad()
def round_(values: Tensor, out: Tensor, random_bits: Tensor) -> None:
    """Round up in magnitude where the low half of the bits and the draw overflow.

    The chance of it is low half / 65536, the distance to the lower neighbour in ulps.
    What is beyond the largest bf16 stays there: no draw makes an infinity. Infinities
    and NaN stay what they are, and a NaN keeps its sign.

    Args:
        values: fp32.
        out: bf16, written.
        random_bits: int32 in [0, 65536), as many as there are values, in their order.
    """
    bits = values.view(torch.int32)
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + random_bits.view(values.shape)) >> 16
    # Not carried into infinity, and neither from infinity nor NaN.
    round_up = torch.where((high & 0x7FFF) < _LARGEST, round_up, 0)
    out.view(torch.int16).copy_(keep_nan(bits, high + round_up).to(torch.int16))

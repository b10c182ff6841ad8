"""An fp32 master as a bf16 weight and a 16-bit remainder, without a bit lost.

In: an fp32 tensor. Out: its high half rounded to bf16, half away from zero, and its low
half as int16; and back. All in integers, so that a compiler has no rounding to drop.
"""

from __future__ import annotations

import torch
from torch import Tensor

INFINITE = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
QUIET = 0x40
"""The bit of a bf16 that makes it NaN whatever its other fraction bits are."""


@torch.no_grad()
def encode_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split a master; the weight is within half an ulp of it, ties away from zero.

    A finite master of 0x7F7F8000 or more, beyond the largest bf16, gives an infinite
    weight, and decodes exactly all the same. NaN gives NaN in both.

    Args:
        master: fp32.
        weight: bf16, written.
        remainder: int16, written; the low half of the master's bits.
    """
    bits = master.view(torch.int32)
    # Sign-extended here, so that the conversion to int16 is exact and need not wrap.
    low = (bits << 16) >> 16
    remainder.copy_(low.to(torch.int16))
    high = (bits >> 16) + (low < 0).to(torch.int32)
    weight.view(torch.int16).copy_(keep_nan(bits, high).to(torch.int16))


@torch.no_grad()
def decode_(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Put a master together again: every bit of it, but for the payload of a NaN.

    A NaN comes back with the sign and the low half it had, and bit 22 set. A zero with
    a negative remainder, which no master gives, is what somebody who sets weights to
    zero leaves behind: it decodes to less than 2**-133, not to the NaN that the formula
    makes of it.

    Args:
        weight: bf16.
        remainder: int16.
        master: fp32, written.
    """
    high = weight.view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    magnitude = high & 0x7FFF
    # Only these were ever carried into: not zero, and not NaN.
    rounded_up = (low < 0) & (magnitude > 0) & (magnitude <= INFINITE >> 16)
    bits = ((high - rounded_up.to(torch.int32)) << 16) | (low & 0xFFFF)
    master.view(torch.int32).copy_(bits)


def keep_nan(bits: Tensor, rounded: Tensor) -> Tensor:
    """Return what was rounded, with NaN where there was NaN.

    Why: a carry makes zero of some NaN, and cutting the low half makes infinity of
    others; a model with such a weight looks healthy.

    Args:
        bits: Of fp32 numbers, int32.
        rounded: Of the bf16 numbers they became, int32.
    """
    nan = (bits & MAGNITUDE) > INFINITE
    return torch.where(nan, (bits >> 16) | QUIET, rounded)

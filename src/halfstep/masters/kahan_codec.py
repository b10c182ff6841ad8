"""An fp32 master as a bf16 weight and a bf16 compensation of its rounding.

In: an fp32 tensor. Out: the nearest bf16, and what is missing from it, as bf16; and
back. Rounded in integers: compilers drop casts to bf16 and back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.masters.split_codec import INFINITE, keep_nan


@torch.no_grad()
def encode_(master: Tensor, weight: Tensor, compensation: Tensor) -> None:
    """Split a master; what `decode_` returns is off by at most 2**-17 of it.

    With 2**e <= |master| < 2**(e+1), weight and master differ by at most half an ulp of
    bf16, 2**(e-8), and fp32 holds that difference exactly. It is rounded to 8
    significant bits: at most 2**(e-8) * 2**-9 is lost. bf16 ends at 2**-133, so at most
    2**-134 is lost where that is more, below 2**-117.

    Args:
        master: fp32.
        weight: bf16, written: the nearest, ties to even; infinite beyond the largest.
        compensation: bf16, written; 0 where the weight is not finite.
    """
    high = nearest(master)
    missing = master - (high << 16).view(torch.float32)
    finite = (high & (INFINITE >> 16)) != INFINITE >> 16
    low = torch.where(finite, nearest(missing), 0)
    weight.view(torch.int16).copy_(high.to(torch.int16))
    compensation.view(torch.int16).copy_(low.to(torch.int16))


@torch.no_grad()
def decode_(weight: Tensor, compensation: Tensor, master: Tensor) -> None:
    """Add the two in fp32, which is exact for what `encode_` wrote.

    -0.0 comes back as 0.0.

    Args:
        weight: bf16.
        compensation: bf16.
        master: fp32, written.
    """
    torch.add(weight.float(), compensation.float(), out=master)


def nearest(values: Tensor) -> Tensor:
    """Round fp32 to bf16, ties to even; return the bits as int32, sign-extended.

    A NaN keeps its sign, on every device.
    """
    bits = values.view(torch.int32)
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + 0x7FFF + (high & 1)) >> 16
    return keep_nan(bits, high + round_up)

"""Encodes and decodes chunks of finite numbers in a few operations.

In: what the three other codecs take. Out: the same bits. Their care for
inf, NaN and what nothing encodes costs most of their time; here one sum says whether a
chunk needs it, and if so they do the work.
"""

from __future__ import annotations

from threading import local
from typing import TYPE_CHECKING

import torch

from halfstep.masters import kahan_codec, split_codec, stochastic_codec

if TYPE_CHECKING:
    from torch import Tensor

_MIN_SIZE = 4096


class Scratch(local):
    """Memory for one chunk, used again and again; each thread of Python has its own."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(
        self, name: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory under a name, for so many numbers."""
        key = (name, dtype, device)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            # A small model should not pay for a whole chunk.
            size = max(_MIN_SIZE, 1 << (numel - 1).bit_length())
            buffer = self.buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:numel]


scratch = Scratch()


def encode_(fp32: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Encode fp32 values: split if the residual is int16, kahan if it is bf16."""
    if residual.dtype == torch.int16:
        if not _all_finite(fp32):
            split_codec.encode_(fp32, weight, residual)
            return
        bits = fp32.view(torch.int32)
        word = _int32_scratch(fp32)
        torch.bitwise_left_shift(bits, 16, out=word)
        residual.copy_(word.bitwise_right_shift_(16))
        torch.add(bits, 0x8000, out=word)
        _as_int16(weight).copy_(word.bitwise_right_shift_(16))
        return
    missing = scratch("missing", fp32.numel(), torch.float32, fp32.device)
    is_finite = _all_finite(fp32)
    if is_finite:
        high = _nearest(fp32)
        _as_int16(weight).copy_(high)
        torch.sub(fp32, high.bitwise_left_shift_(16).view(torch.float32), out=missing)
        # A weight that was rounded to infinity lacks that much.
        is_finite = _all_finite(missing)
    if is_finite:
        _as_int16(residual).copy_(_nearest(missing))
    else:
        kahan_codec.encode_(fp32, weight, residual)


def decode_(weight: Tensor, residual: Tensor, fp32: Tensor) -> None:
    """Decode fp32 values, by the dtype of the residual."""
    if residual.dtype != torch.int16:
        fp32.copy_(weight)
        missing = scratch("missing", fp32.numel(), torch.float32, fp32.device)
        fp32.add_(missing.copy_(residual))
        return
    if not fp32.is_cpu:
        split_codec.decode_(weight, residual, fp32)
        return
    word = _int32_scratch(fp32)
    fp32.view(torch.int32).copy_(_as_int16(weight)).bitwise_left_shift_(16)
    # Borrows one from the high half where the rest is negative.
    fp32.view(torch.int32).add_(word.copy_(residual))
    # So zero with a negative rest has become NaN, and NaN has stayed.
    if not _all_finite(fp32):
        split_codec.decode_(weight, residual, fp32)


def round_(values: Tensor, out: Tensor, random_bits: Tensor) -> None:
    """Round to bf16 with random bits."""
    if _all_finite(values):
        word = torch.add(
            values.view(torch.int32), random_bits, out=_int32_scratch(values)
        )
        _as_int16(out).copy_(word.bitwise_right_shift_(16))
        # No draw may carry into infinity.
        if _all_finite(out):
            return
    stochastic_codec.round_(values, out, random_bits)


def _all_finite(values: Tensor) -> bool:
    """Say that all are finite; a sum that overflows says no, which costs time alone.

    On a device it is not asked: the answer would have to be waited for.
    """
    return values.is_cpu and bool(torch.isfinite(values.sum()))


def _nearest(values: Tensor) -> Tensor:
    """Return finite fp32 rounded to bf16, ties to even, as bits in int32."""
    bits = values.view(torch.int32)
    word = torch.bitwise_right_shift(bits, 16, out=_int32_scratch(values))
    word.bitwise_and_(1).add_(bits).add_(0x7FFF)
    return word.bitwise_right_shift_(16)


def _as_int16(low: Tensor) -> Tensor:
    return low.view(torch.int16)


def _int32_scratch(like: Tensor) -> Tensor:
    return scratch("word", like.numel(), torch.int32, like.device)

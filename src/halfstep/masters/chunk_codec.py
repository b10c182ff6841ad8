"""The forms' rounding in a few operations each, for chunks of finite numbers.

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

_LEAST = 4096


class Scratch(local):
    """Memory for one chunk, used again and again; each thread of Python has its own."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(
        self, name: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory under a name, for so many numbers."""
        key = (name, dtype, device)
        held = self.kept.get(key)
        if held is None or held.numel() < numel:
            # A small model should not pay for a whole chunk.
            size = max(_LEAST, 1 << (numel - 1).bit_length())
            held = self.kept[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:numel]


scratch = Scratch()


def encode_(truth: Tensor, weight: Tensor, extra: Tensor) -> None:
    """Take a truth apart: split where `extra` is int16, kahan where it is bf16."""
    if extra.dtype == torch.int16:
        if not _finite(truth):
            split_codec.encode_(truth, weight, extra)
            return
        bits = truth.view(torch.int32)
        word = _word(truth)
        torch.bitwise_left_shift(bits, 16, out=word)
        extra.copy_(word.bitwise_right_shift_(16))
        torch.add(bits, 0x8000, out=word)
        _view(weight).copy_(word.bitwise_right_shift_(16))
        return
    missing = scratch("missing", truth.numel(), torch.float32, truth.device)
    quick = _finite(truth)
    if quick:
        high = _nearest(truth)
        _view(weight).copy_(high)
        torch.sub(truth, high.bitwise_left_shift_(16).view(torch.float32), out=missing)
        # A weight that was rounded to infinity lacks that much.
        quick = _finite(missing)
    if quick:
        _view(extra).copy_(_nearest(missing))
    else:
        kahan_codec.encode_(truth, weight, extra)


def decode_(weight: Tensor, extra: Tensor, truth: Tensor) -> None:
    """Put a truth together; what `extra` is says how."""
    if extra.dtype != torch.int16:
        truth.copy_(weight)
        missing = scratch("missing", truth.numel(), torch.float32, truth.device)
        truth.add_(missing.copy_(extra))
        return
    if not truth.is_cpu:
        split_codec.decode_(weight, extra, truth)
        return
    word = _word(truth)
    truth.view(torch.int32).copy_(_view(weight)).bitwise_left_shift_(16)
    # Borrows one from the high half where the rest is negative.
    truth.view(torch.int32).add_(word.copy_(extra))
    # So zero with a negative rest has become NaN, and NaN has stayed.
    if not _finite(truth):
        split_codec.decode_(weight, extra, truth)


def round_(values: Tensor, out: Tensor, sixteen: Tensor) -> None:
    """Round to bf16 with random bits."""
    if _finite(values):
        word = torch.add(values.view(torch.int32), sixteen, out=_word(values))
        _view(out).copy_(word.bitwise_right_shift_(16))
        # No draw may carry into infinity.
        if _finite(out):
            return
    stochastic_codec.round_(values, out, sixteen)


def _finite(values: Tensor) -> bool:
    """Say that all are finite; a sum that overflows says no, which costs time alone.

    On a device it is not asked: the answer would have to be waited for.
    """
    return values.is_cpu and bool(torch.isfinite(values.sum()))


def _nearest(values: Tensor) -> Tensor:
    """Return finite fp32 rounded to bf16, ties to even, as bits in int32."""
    bits = values.view(torch.int32)
    word = torch.bitwise_right_shift(bits, 16, out=_word(values))
    word.bitwise_and_(1).add_(bits).add_(0x7FFF)
    return word.bitwise_right_shift_(16)


def _view(low: Tensor) -> Tensor:
    return low.view(torch.int16)


def _word(like: Tensor) -> Tensor:
    return scratch("word", like.numel(), torch.int32, like.device)

"""What some versions of torch, or a lesser CPU, do not do."""

from __future__ import annotations

import functools

import pytest
import torch

PINNED = "2.13."
"""The torch of constraints.txt."""


def only_pinned(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that knows numbers of the pinned torch alone."""
    return pytest.mark.skipif(
        not torch.__version__.startswith(PINNED),
        reason=f"{why} in torch {PINNED}x, this is {torch.__version__}",
    )


@functools.cache
def torch_has_lstm(low: torch.dtype) -> bool:
    """Say whether torch.autocast runs an LSTM on this CPU.

    oneDNN has one in bf16 from AVX-512 on, in fp16 from AMX-FP16 on; where it has none,
    torch.autocast fails.
    """
    lstm, x = torch.nn.LSTM(4, 4), torch.ones(1, 1, 4)
    try:
        with torch.autocast("cpu", low):
            lstm(x)
    except RuntimeError as error:
        if "LSTM forward propagation primitive" not in str(error):
            raise
        return False
    return True

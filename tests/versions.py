"""What an older torch or a lesser CPU does not do, and so cannot be tested with it."""

from __future__ import annotations

import functools

import pytest
import torch

IS_2_6 = torch.__version__.startswith("2.6.")
BEFORE_2_9 = not hasattr(torch.library, "get_kernel")

before_2_9 = pytest.mark.skipif(
    BEFORE_2_9,
    reason=f"torch {torch.__version__} cannot call a kernel of its own behind ours, so "
    "that torch.autocast, the oracle here, has no cache of its own left",
)

_NAMED_DIMENSIONS = (
    *("cumprod.dimname", "cumsum.dimname", "log_softmax.Dimname", "prod.dim_Dimname"),
    *("softmax.Dimname", "sum.dim_DimnameList"),
)
_NAMES = (*_NAMED_DIMENSIONS, "norm.names_ScalarOpt_dim")
MORE_IN_2_6 = {
    "cpu": ("index_copy.dimname", "prod.dim_Dimname"),
    "cuda": _NAMES,
    "mps": _NAMED_DIMENSIONS,
    "xpu": _NAMES,
}
"""What torch 2.6 casts and 2.13 does not: operations on named dimensions."""
LESS_IN_2_6: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("rms_norm",),
    "mps": ("conv3d", "conv_transpose3d.input"),
    "xpu": ("rms_norm",),
}
"""What torch 2.13 casts and 2.6 does not."""


def beyond_2_6(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that torch 2.6 cannot pass, for a reason of its own."""
    return pytest.mark.skipif(IS_2_6, reason=f"torch {torch.__version__} {why}")


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

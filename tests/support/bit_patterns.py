"""Tensors of any bit patterns, and the same numbers as numpy reads them."""

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

WIDTHS = {
    torch.float16: (16, torch.int16),
    torch.bfloat16: (16, torch.int16),
    torch.float32: (32, torch.int32),
    torch.float64: (64, torch.int64),
}
Wide = np.ndarray[Any, np.dtype[np.float64]]


def wide_of(tensor: Tensor) -> Wide:
    width, integer = WIDTHS[tensor.dtype]
    bits = tensor.contiguous().view(integer).numpy().reshape(-1)
    with np.errstate(invalid="ignore"):
        if tensor.dtype == torch.bfloat16:
            return (bits.astype(np.int32) << 16).view(np.float32).astype(np.float64)
        return bits.view(f"float{width}").astype(np.float64)


EDGES = [0.0, -0.0, 1.0, -1.5, 65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25]
EDGES += [2.0**-25 * 1.01, 2.0**-14, 2.0**-14 * 0.9999, 3e38, -3.4e38, 3.3953e38]
EDGES += [2.0**-126, 2.0**-133, 2.0**-134, 2.0**-149, math.inf, -math.inf, math.nan]
HUGE = [*EDGES, 1e300, -1.7e308, 1e150, 1e-300, 5e-324, 2.0**-1022, 2.0**480]


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of any bit patterns, perhaps with gaps between its numbers."""
    dtype = dtype or draw(st.sampled_from(list(WIDTHS)))
    width, integer = WIDTHS[dtype]
    half = 2 ** (width - 1)
    edges = torch.tensor(HUGE, dtype=torch.float64).to(dtype).view(integer).tolist()
    number = st.integers(-half, half - 1) | st.sampled_from(edges)
    bits = draw(st.lists(number, max_size=12))
    tensor = torch.tensor(bits, dtype=integer).view(dtype)
    form = draw(st.sampled_from(["flat", "gaps", "turned", "spread"]))
    if form == "gaps":
        return tensor[::2]
    if form == "turned" and len(bits) % 2 == 0:
        return tensor.view(2, -1).t()
    if form == "spread":
        return tensor[:, None].expand(-1, 3)
    return tensor

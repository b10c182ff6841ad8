"""Norms of lists of tensors, beside numpy's in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.numerics.norms import total_norm

SIZES = st.lists(
    st.sampled_from([0, 1, 2, 7, 16, 33, 2047, 2048, 2049]), min_size=1, max_size=4
)
DTYPES = st.sampled_from([torch.float16, torch.float32])


@given(sizes=SIZES, dtypes=st.lists(DTYPES, min_size=4, max_size=4))
def test_total_norm(sizes: list[int], dtypes: list[torch.dtype]) -> None:
    """Law: the norm is numpy's, in the precision of its parts.

    Each tensor's own norm is rounded to its dtype; their squares add up in fp32.
    """
    parts = zip(sizes, dtypes, strict=False)
    grads = [(torch.rand(n) * 0.875 + 0.125).to(dtype) for n, dtype in parts]
    exact = np.concatenate([grad.double().numpy() for grad in grads])
    expected = float(np.sqrt((exact**2).sum()))
    found = float(total_norm(grads) or 0.0)
    assert found == pytest.approx(expected, rel=2 * 2.0**-11, abs=2.0**-24)

"""Formats against torch.finfo and all 65,536 patterns."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.numerics.formats import BF16, FORMATS, FP16, FloatFormat
from halfstep.numerics.norms import total_norm


def all_patterns(format_: FloatFormat) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return every number that 16 bits spell, decoded by hand."""
    patterns = np.arange(2**16, dtype=np.int64)
    sign = np.where(patterns >> 15, -1.0, 1.0)
    exponent = patterns >> format_.mantissa_bits & 2**format_.exponent_bits - 1
    fraction = (patterns & 2**format_.mantissa_bits - 1) / 2**format_.mantissa_bits
    bias = 2 ** (format_.exponent_bits - 1) - 1
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    subnormal = fraction * 2.0 ** (1 - bias)
    special = np.where(fraction == 0, np.inf, np.nan)
    last = 2**format_.exponent_bits - 1
    size = np.select([exponent == last, exponent == 0], [special, subnormal], normal)
    return np.asarray(sign * size)


@pytest.mark.parametrize("format_", [BF16, FP16], ids=str)
def test_patterns_decode_as_torch_does(format_: FloatFormat) -> None:
    """Law: the two bit widths alone decode all 65,536 patterns as torch does."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    theirs = bits.view(format_.dtype).double().numpy()
    np.testing.assert_array_equal(all_patterns(format_), theirs)


@pytest.mark.parametrize("format_", [BF16, FP16], ids=str)
def test_numbers_agree_with_brute_force(format_: FloatFormat) -> None:
    """Law: each derived number is the extreme that its docstring says it is."""
    every = all_patterns(format_)
    finite = np.unique(every[np.isfinite(every) & (every > 0)])
    assert format_.max == finite[-1]
    assert format_.min_subnormal == finite[0]
    assert format_.epsilon == finite[finite > 1][0] - 1
    # Precision is full once the gap to the next number is a constant share.
    gaps = np.diff(finite) / 2.0 ** np.floor(np.log2(finite[:-1]))
    assert format_.min_normal == finite[:-1][gaps <= format_.epsilon][0]


@pytest.mark.parametrize("format_", FORMATS.values(), ids=str)
def test_parse_undoes_str(format_: FloatFormat) -> None:
    """Law: every spelling of a format leads to it, its own word and dtype included."""
    long = {"fp16": "half", "fp32": "float", "bf16": "bfloat16"}[format_.name]
    spellings = str(format_), format_.dtype, str(format_.dtype), long
    for word in (*spellings, f" {format_.name.upper()} "):
        assert formats.parse(word) is format_


@pytest.mark.parametrize("word", ["fp61", "", "fp8", "double", torch.float64])
def test_unknown_word(word: str | torch.dtype) -> None:
    """Law: what is no format is refused with the word and the choice."""
    with pytest.raises(UserError) as caught:
        formats.parse(word)
    assert str(caught.value) == (
        f"dtype={word!r} is not a format; choose one of fp32, bf16, fp16."
    )


def test_is_low() -> None:
    """Law: exactly the 16-bit floats are low."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {d for d in dtypes if formats.is_low(d)} == {torch.bfloat16, torch.float16}


# Norms of lists of tensors, beside numpy's in float64


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

"""Formats against torch.finfo and all 65,536 patterns; casting keeps containers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.numerics.formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    FloatFormat,
    cast_floating,
)

UNTOUCHED = (torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
TRAINED_IN = (torch.float32, torch.bfloat16, torch.float16)


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


def test_widths_by_hand() -> None:
    """Law: the ranges are those that the formats were invented with."""
    assert (FP16.max, FP16.min_normal, FP16.min_subnormal) == (65504, 2**-14, 2**-24)
    assert (BF16.max, BF16.min_normal, BF16.epsilon) == (255 * 2.0**120, 2**-126, 2**-7)
    assert (FP32.bytes, BF16.bytes, FP16.bytes) == (4, 2, 2)
    assert FP32.max == (2 - 2**-23) * 2.0**127


@pytest.mark.parametrize("format_", FORMATS.values(), ids=str)
def test_parse_undoes_str(format_: FloatFormat) -> None:
    """Law: every spelling of a format leads to it, its own word and dtype included."""
    assert formats.parse(str(format_)) is format_
    assert formats.parse(format_.dtype) is format_
    assert formats.parse(str(format_.dtype)) is format_
    assert formats.parse(f" {format_.name.upper()} ") is format_


@pytest.mark.parametrize(
    ("word", "format_"), [("half", FP16), ("float", FP32), ("bfloat16", BF16)]
)
def test_long_names(word: str, format_: FloatFormat) -> None:
    """Law: torch's other names are understood."""
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


class Pair(NamedTuple):
    left: Tensor
    right: object


@dataclasses.dataclass(frozen=True)
class Batch:
    values: Tensor
    ids: Tensor
    inner: object = None
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.values.numel())


def leaf(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, 1]).to(dtype)


VALUES = st.recursive(
    st.one_of(
        st.sampled_from([*TRAINED_IN, *UNTOUCHED]).map(leaf),
        st.none(),
        st.integers(),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(lambda item: OrderedDict(a=item)),
        inner.map(lambda item: UserDict({"a": item})),
        inner.map(lambda item: Pair(leaf(torch.float16), item)),
        inner.map(
            lambda item: Batch(leaf(torch.float32), leaf(torch.int64), inner=item)
        ),
    ),
    max_leaves=12,
)


def assert_cast(before: Any, after: Any, dtype: torch.dtype) -> None:
    """Compare, value by value, with the rule as the docstring states it."""
    assert type(after) is type(before)
    if isinstance(before, Tensor):
        wanted = dtype if before.dtype in TRAINED_IN else before.dtype
        assert after.dtype == wanted
        assert torch.equal(after.to(before.dtype), before)
    elif isinstance(before, dict | UserDict):
        assert list(after) == list(before)
        assert_cast(list(before.values()), list(after.values()), dtype)
    elif isinstance(before, list | tuple):
        assert len(after) == len(before)
        for old, new in zip(before, after, strict=True):
            assert_cast(old, new, dtype)
    elif isinstance(before, Batch):
        old, new = [
            [getattr(batch, f.name) for f in dataclasses.fields(batch)]
            for batch in (before, after)
        ]
        assert_cast(old, new, dtype)
    else:
        assert after is before


@given(value=VALUES, dtype=st.sampled_from(TRAINED_IN))
def test_cast_keeps_structure(value: object, dtype: torch.dtype) -> None:
    """Law: containers keep type and order, and just fp32, bf16 and fp16 are cast."""
    assert_cast(value, cast_floating(value, dtype), dtype)


def test_model_output_stays_one() -> None:
    """Law: a transformers ModelOutput keeps type, keys, attributes and None fields."""
    hidden = (torch.ones(1), torch.ones(1, dtype=torch.float64))
    output: Any = MaskedLMOutput(logits=torch.ones(2), hidden_states=hidden)
    cast = cast_floating(output, torch.bfloat16)
    assert type(cast) is MaskedLMOutput
    assert list(cast) == ["logits", "hidden_states"]
    assert cast.loss is None
    assert cast.logits is cast["logits"]
    assert cast.logits.dtype == torch.bfloat16
    assert [h.dtype for h in cast["hidden_states"]] == [torch.bfloat16, torch.float64]
    assert output.logits.dtype == torch.float32
    inner: Any = BaseModelOutput(torch.ones(1))
    nested = cast_floating({"a": [inner]}, torch.float16)
    assert nested["a"][0].last_hidden_state.dtype == torch.float16


def test_torch_containers() -> None:
    """Law: torch's own tuples survive: packed sequences, return types, sizes."""
    packed = cast_floating(pack_sequence([torch.ones(2), torch.ones(1)]), torch.float16)
    assert isinstance(packed, PackedSequence)
    assert (packed.data.dtype, packed.batch_sizes.dtype) == (torch.float16, torch.int64)
    found = cast_floating(torch.ones(2, 2).max(0), torch.float16)
    assert isinstance(found, torch.return_types.max)
    assert (found.values.dtype, found.indices.dtype) == (torch.float16, torch.int64)
    assert cast_floating(torch.Size([2, 3]), torch.float16) == torch.Size([2, 3])

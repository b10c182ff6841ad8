"""Histograms of exponents, against numpy and against what casting really loses."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from bit_patterns import WIDTHS, tensors, wide_of
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.numerics import exponents as room
from halfstep.numerics.exponents import (
    BINS,
    count_exponents,
    flushed_share,
    largest_safe_scale,
    power_of_two,
    subnormal_share,
    unscale_histogram,
)

ONE = torch.tensor(1.0)
CHECKED: dict[str, Any] = {"check_invariants": True}
LOW = [torch.float16, torch.bfloat16]


def by_numpy(values: np.ndarray[Any, Any], shift: int) -> dict[int, int]:
    """Return bin -> count with frexp; fp64's subnormal numbers count as zeros."""
    bins = []
    for value in values.tolist():
        if not math.isfinite(value):
            bins.append(BINS - 1)
        elif abs(value) < 2.0**-1022:
            bins.append(0)
        else:
            exponent = int(np.frexp(value)[1]) - 1 - shift
            bins.append(min(max(exponent + 1023, 1), BINS - 2))
    return {one: bins.count(one) for one in bins}


def by_us(histogram: Tensor) -> dict[int, int]:
    filled = histogram.nonzero().flatten().tolist()
    return {one: int(histogram[one]) for one in filled}


def exponents(tensors: Sequence[Tensor], scale: Tensor) -> Tensor:
    counts = [count_exponents(tensor) for tensor in tensors]
    return unscale_histogram(torch.stack(counts).sum(0), scale)


def close(share: Tensor, expected: float) -> None:
    """Hold a share against a quotient of small integers."""
    assert share.shape == ()
    assert share.item() == pytest.approx(expected, abs=1e-6)


@given(tensors(), st.integers(-126, 127))
def test_exponents_are_frexps(tensor: Tensor, shift: int) -> None:
    """Law: each number is counted at floor(log2) of its unscaled size, whatever it is.

    Bit patterns of all formats: subnormal, both zeros, inf, NaN, none at all.
    """
    histogram = exponents([tensor], torch.tensor(2.0**shift))
    assert histogram.dtype == torch.int64
    assert by_us(histogram) == by_numpy(wide_of(tensor), shift)


def test_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: counts add up over tensors and pieces of them; layout plays no part."""
    dense = torch.tensor([[1.0, 2.0, 4.0, 0.0], [1.0, 1.0, 1.0, 3.0]])
    where = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(where, torch.tensor([8.0, -8.0]), (4,), **CHECKED)
    complex_ = torch.tensor([2 - 8j]).conj()
    monkeypatch.setattr(room, "_CHUNK_NUMEL", 3)
    histogram = exponents([dense.T, sparse, complex_, torch.empty(0)], ONE)
    assert by_us(histogram) == {0: 1, 1023: 4, 1024: 3, 1025: 1, 1026: 3}


@given(st.floats(2.0**-100, 2.0**100), st.floats(2.0**-20, 2.0**20, exclude_min=True))
def test_a_scale_that_is_no_power_of_two(number: float, scale: float) -> None:
    """Law: the exponent is then right or one too high: never too low."""
    number, scale = float(np.float32(number)), float(np.float32(scale))
    (found,) = by_us(exponents([torch.tensor(number)], torch.tensor(scale)))
    exact = int(np.frexp(number / scale)[1]) - 1
    assert found - 1023 - exact in {0, 1}


# What a histogram tells


def test_largest_safe_scale() -> None:
    """Law: 2**(15 - e - margin) for fp16, 2**(127 - e - margin) for bf16: by hand."""
    histogram = exponents([torch.tensor([3.0, -0.25, 0.0, math.inf, math.nan])], ONE)
    assert largest_safe_scale(histogram).item() == 2.0**13
    assert largest_safe_scale(histogram, margin=0).item() == 2.0**14
    assert largest_safe_scale(histogram, margin=3).item() == 2.0**11
    assert largest_safe_scale(histogram, torch.bfloat16).item() == 2.0**125
    scale = largest_safe_scale(histogram)
    assert (scale.dtype, scale.shape) == (torch.float32, ())


@given(
    st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1), st.integers(0, 4)
)
def test_largest_safe_scale_is_safe_and_largest(
    numbers: list[float], margin: int
) -> None:
    """Law: at it fp16 holds all with `margin` to spare; 2**(margin + 1) more overflows.

    At margin 0, only what lies between 65504 and 65536 may overflow.
    """
    top = max(map(abs, numbers))
    assume(top >= 2.0**-90)
    histogram = exponents([torch.tensor(numbers)], ONE)
    scale = largest_safe_scale(histogram, margin=margin).item()
    assert top * scale < 2.0 ** (16 - margin)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(top * scale * 2 ** (margin + 1)))
        assert margin == 0 or np.isfinite(np.float16(top * scale))


@pytest.mark.parametrize("numbers", [[], [0.0, -0.0], [math.inf, -math.inf, math.nan]])
def test_nothing_seen(numbers: list[float]) -> None:
    """Law: where no finite number other than zero was seen, no scale is named."""
    histogram = exponents([torch.tensor(numbers)], ONE)
    assert largest_safe_scale(histogram).isnan()
    close(flushed_share(histogram, ONE), 0.0)
    close(subnormal_share(histogram, ONE), 0.0)


def test_power_of_two() -> None:
    """Law: exact over all of fp32's normal exponents, clamped outside of them."""
    found = power_of_two(torch.arange(-130, 131))
    expected = [2.0 ** min(max(e, -126), 127) for e in range(-130, 131)]
    assert found.tolist() == expected


NEAR_THE_EDGES = st.lists(
    st.builds(
        lambda fraction, exponent: fraction * 2.0**exponent,
        st.sampled_from([1.0, -1.5, 1 + 2.0**-23, -2 + 2.0**-23, 0.0]),
        st.integers(-27, -12) | st.integers(-136, -124),
    ),
    max_size=9,
)


@given(NEAR_THE_EDGES, st.integers(-3, 3), st.sampled_from(LOW))
def test_flushed_is_what_casting_loses(
    drawn: list[float], shift: int, low: torch.dtype
) -> None:
    """Law: the share equals that of new zeros after the cast.

    Half the smallest number exactly, a tie that goes to zero, is the one not counted.
    """
    numbers = torch.tensor(drawn)
    seen = numbers[numbers != 0].double()
    info = torch.finfo(low)
    tie = info.smallest_normal * info.eps / 2
    scaled = seen * 2.0**shift
    zeros = int((scaled.to(low) == 0).sum() - (scaled.abs() == tie).sum())
    share = flushed_share(exponents([numbers], ONE), torch.tensor(2.0**shift), low)
    close(share, zeros / max(len(seen), 1))


@given(NEAR_THE_EDGES, st.integers(-3, 3), st.sampled_from(LOW))
def test_subnormal_by_numpy(drawn: list[float], shift: int, low: torch.dtype) -> None:
    """Law: the share equals that of exponents from -25 to -15 (bf16: -134 to -127)."""
    seen = np.array([number for number in drawn if number], np.float32)
    at = np.frexp(seen.astype(np.float64))[1] - 1 + shift
    start, end = (-25, -14) if low == torch.float16 else (-134, -126)
    histogram = exponents([torch.tensor(drawn)], ONE)
    share = subnormal_share(histogram, torch.tensor(2.0**shift), low)
    close(share, float(((at >= start) & (at < end)).sum()) / max(len(seen), 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDTHS)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Law: a GPU counts as the CPU does, on its own device, and does not wait."""
    width, integer = WIDTHS[dtype]
    half = 2 ** (width - 1)
    bits = torch.randint(-half, half - 1, (100_000,), dtype=integer)
    tensor = torch.cat((bits, torch.tensor([0, 1, -1], dtype=integer))).view(dtype)
    scale = torch.tensor(2.0**7)
    there, scale_there = tensor.cuda(), scale.cuda()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        histogram = exponents([there], scale_there)
        safe = largest_safe_scale(histogram)
        share = flushed_share(histogram, scale_there)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    expected = exponents([tensor], scale)
    assert torch.equal(histogram.cpu(), expected)
    assert torch.equal(safe.cpu(), largest_safe_scale(expected))
    assert torch.equal(share.cpu(), flushed_share(expected, scale))

"""bf16 weight and 16-bit remainder: all bits of the master, for every master there is.

The oracle is the format itself, in numpy's integers and float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import codec_cases as cases
import numpy as np
import pytest
import torch
from codec_cases import dense, floats, fresh_compiler_
from torch import Tensor, nn

from halfstep.masters import bf16_codecs

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["fresh_compiler_"]
CHUNK = 1 << 24
INF = 0x7F800000


def bits(values: Tensor) -> Any:
    """Return the bits of fp32, bf16 or int16, unsigned."""
    if values.dtype is torch.float32:
        return values.detach().view(torch.int32).numpy().view(np.uint32)
    return values.detach().view(torch.int16).numpy().view(np.uint16)


def encoded(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and remainder of a master."""
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    bf16_codecs.split_encode_(master, weight, remainder)
    return weight, remainder


def decoded(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the master of a weight and remainder."""
    master = torch.empty_like(weight, dtype=torch.float32)
    bf16_codecs.split_decode_(weight, remainder, master)
    return master


def is_nan(patterns: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Say which bits are NaN."""
    return (patterns & np.uint32(0x7FFFFFFF)) > INF


def come_back(patterns: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return what bits must be after both ways: NaN become quiet, the rest the same."""
    return np.where(is_nan(patterns), patterns | np.uint32(0x00400000), patterns)


def size_of(patterns: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return magnitudes as the format defines them; 2**128 where it says infinite."""
    exponent = (patterns >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64)
    fraction = (patterns & np.uint32(0x7FFFFF)).astype(np.float64)
    return np.ldexp(fraction + (exponent > 0) * 2.0**23, np.maximum(exponent, 1) - 150)


def nearest_away(patterns: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Round to bf16 by distance: of two neighbours the nearer, the outer one of two."""
    inner = patterns & np.uint32(0xFFFF0000)
    outer = inner + np.uint32(0x10000)
    size = size_of(patterns)
    out = size_of(outer) - size <= size - size_of(inner)
    away = np.where(out, outer, inner)
    special = (patterns & np.uint32(INF)) == INF
    return (np.where(special, come_back(patterns), away) >> 16).astype(np.uint16)


def test_both_halves() -> None:
    """Law: the weight is the nearest bf16, half away; the remainder the low half."""
    patterns = dense()
    weight, remainder = encoded(floats(patterns))
    np.testing.assert_array_equal(bits(weight), nearest_away(patterns))
    np.testing.assert_array_equal(bits(remainder), patterns.astype(np.uint16))


def test_every_bit_comes_back() -> None:
    """Law: decoded is what was encoded, bit for bit; a NaN gains bit 22 alone."""
    patterns = dense()
    found = bits(decoded(*encoded(floats(patterns))))
    np.testing.assert_array_equal(found, come_back(patterns))


@pytest.mark.slow
def test_every_number_there_is() -> None:
    """Law: all of the 2**32 patterns come back so; no two numbers share a code."""
    counted = torch.arange(CHUNK, dtype=torch.int32)
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        patterns = counted + start
        master = patterns.view(torch.float32)
        weight, remainder = encoded(master)
        nan = master.isnan()
        expected = torch.where(nan, patterns | 0x00400000, patterns)
        found = decoded(weight, remainder).view(torch.int32)
        assert torch.equal(found, expected), f"from {start:#x} on"
        assert torch.equal(weight.isnan(), nan), f"from {start:#x} on"


def test_every_code_comes_back() -> None:
    """Law: decoding and encoding give back each code that a master can have.

    The others decode to what does no harm: a zero weight to next to nothing, a NaN to
    NaN, an infinite weight with a positive remainder to NaN.
    """
    patterns = dense()
    weight = torch.from_numpy((patterns >> 16).astype(np.uint16).view(np.int16))
    remainder = torch.from_numpy(patterns.astype(np.uint16).view(np.int16))
    master = decoded(weight.view(torch.bfloat16), remainder)
    again = encoded(master)

    size = weight.to(torch.int32) & 0x7FFF
    emptied = (size == 0) & (remainder < 0)
    infinite = (size == INF >> 16) & (remainder > 0)
    nan = size > INF >> 16
    usual = ~(emptied | infinite | nan)
    assert torch.equal(again[0].view(torch.int16)[usual], weight[usual])
    assert torch.equal(again[1][usual], remainder[usual])
    # Two zeros with three of the lows, and the one that was drawn.
    assert 6 <= int(emptied.sum()) <= 8
    assert bool((master[emptied].abs() < 2.0**-133).all())
    assert bool(master[infinite | nan].isnan().all())
    assert bool(master[usual].isfinite().logical_or(master[usual].isinf()).all())


@pytest.mark.parametrize(
    ("pattern", "high"),
    [
        (0x7FFFFFFF, 0x7FFF),  # a carry would make it -0.0
        (0x7FFF8000, 0x7FFF),
        (0xFFFFFFFF, 0xFFFF),  # and this 0.0
        (0xFFFF8000, 0xFFFF),
        (0x7F800001, 0x7FC0),  # cut off, its payload leaves infinity
        (0xFF80FFFF, 0xFFC0),
        (0x7FBFFFFF, 0x7FFF),
        (0x7FC00000, 0x7FC0),  # torch's own
        (0xFFC00000, 0xFFC0),  # that of x86
    ],
)
def test_nan_stays_nan(pattern: int, high: int) -> None:
    """Law: NaN is NaN in the weight too; sign and low half come back."""
    weight, remainder = encoded(floats(np.array([pattern], dtype=np.uint32)))
    assert weight.isnan().all()
    assert bits(weight)[0] == high
    assert bits(decoded(weight, remainder))[0] == pattern | 0x00400000


@pytest.mark.parametrize(
    ("pattern", "high"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x00000001, 0x0000),  # the smallest subnormal
        (0x00007FFF, 0x0000),
        (0x00008000, 0x0001),
        (0x807FFFFF, 0x8080),  # the largest one, rounded to a normal number
        (0x3F808000, 0x3F81),  # a tie; to even it would be 0x3F80
        (0x3F80FFFF, 0x3F81),
        (0x7F7F7FFF, 0x7F7F),
        (0x7F7F8000, 0x7F80),  # beyond the largest bf16
        (0x7F7FFFFF, 0x7F80),  # the largest fp32
        (0xFF7FFFFF, 0xFF80),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_edges(pattern: int, high: int) -> None:
    """Law: zeros keep signs, subnormals survive, an infinite weight hides no bit."""
    weight, remainder = encoded(floats(np.array([pattern], dtype=np.uint32)))
    assert bits(weight)[0] == high
    assert bits(decoded(weight, remainder))[0] == pattern


def test_the_weight_differs_from_a_cast_on_ties_alone() -> None:
    """Law: torch rounds ties to even; nothing else differs."""
    patterns = dense()
    patterns = patterns[~is_nan(patterns)]
    master = floats(patterns)
    differs = (encoded(master)[0] != master.bfloat16()).numpy()
    even = patterns >> np.uint32(16) & np.uint32(1) == 0
    tie = patterns & np.uint32(0xFFFF) == 0x8000
    np.testing.assert_array_equal(differs, even & tie)


@cases.shapes
def test_shapes(shape: tuple[int, ...]) -> None:
    """Law: shape and strides do not matter; parameters are written in place."""
    master = cases.strided(shape)
    weight = nn.Parameter(torch.zeros(master.shape, dtype=torch.bfloat16))
    remainder = torch.zeros(master.shape, dtype=torch.int16)
    version = weight._version
    bf16_codecs.split_encode_(master, weight, remainder)
    assert weight._version > version, "autograd must see that the weight changed"
    back = nn.Parameter(torch.zeros(master.shape))
    bf16_codecs.split_decode_(weight, remainder, back)
    assert torch.equal(back, master)


def both_ways(master: Tensor, weight: Tensor, remainder: Tensor, back: Tensor) -> None:
    """Encode, decode, and encode what is twice as much, for a compiler to fuse."""
    bf16_codecs.split_encode_(master, weight, remainder)
    bf16_codecs.split_decode_(weight, remainder, back)
    back.mul_(2)
    bf16_codecs.split_encode_(back, weight, remainder)


@cases.backends
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(backend: str) -> None:
    """Law: compiled is eager, bit for bit, also where it is fused into one kernel."""
    master = floats(dense()[:-3])  # odd: a vectorised loop has a rest

    def run(function: Any) -> list[Any]:
        back = torch.zeros_like(master)
        weight = torch.zeros_like(master, dtype=torch.bfloat16)
        remainder = torch.zeros_like(master, dtype=torch.int16)
        function(master, weight, remainder, back)
        return [bits(weight), bits(remainder), bits(back)]

    compiled = run(torch.compile(both_ways, backend=backend, fullgraph=True))
    for found, expected in zip(compiled, run(both_ways), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: a GPU gives the same bits."""
    master = floats(dense())
    weight, remainder = encoded(master.cuda())
    back = decoded(weight, remainder).cpu()
    expected = encoded(master)
    np.testing.assert_array_equal(bits(weight.cpu()), bits(expected[0]))
    np.testing.assert_array_equal(bits(remainder.cpu()), bits(expected[1]))
    np.testing.assert_array_equal(bits(back), bits(decoded(*expected)))

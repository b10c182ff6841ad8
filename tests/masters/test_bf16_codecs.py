"""Codecs of compact master weights, on every bit pattern that matters.

The oracles are the formats themselves: numpy's integers, torch's casts and float64.
Whoever changes a random number here changes the course of every run that is resumed.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.masters import bf16_codecs

BF16 = torch.bfloat16
INF = 0x7F800000
LOWS = (0, 1, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def dense() -> NDArray[np.uint32]:
    """Every high half with each of `LOWS`, and one with a low half drawn for it."""
    highs = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    drawn = np.random.default_rng(0).integers(1 << 16, size=1 << 16, dtype=np.uint32)
    return np.concatenate([*(highs | np.uint32(low) for low in LOWS), highs | drawn])


def floats(patterns: NDArray[np.uint32] | list[int]) -> Tensor:
    unsigned = np.asarray(patterns, dtype=np.uint32)
    return torch.from_numpy(unsigned.view(np.int32)).view(torch.float32)


def bits(values: Tensor) -> Any:
    if values.dtype is torch.float32:
        return values.detach().view(torch.int32).numpy().view(np.uint32)
    return values.detach().view(torch.int16).numpy().view(np.uint16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty_like(master, dtype=BF16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    bf16_codecs.split_encode_(master, weight, remainder)
    return weight, remainder


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    master = torch.empty_like(weight, dtype=torch.float32)
    bf16_codecs.split_decode_(weight, remainder, master)
    return master


def kahan(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty_like(master, dtype=BF16)
    compensation = torch.empty_like(master, dtype=BF16)
    bf16_codecs.kahan_encode_(master, weight, compensation)
    return weight, compensation


def added(weight: Tensor, compensation: Tensor) -> Tensor:
    master = torch.empty_like(weight, dtype=torch.float32)
    bf16_codecs.kahan_decode_(weight, compensation, master)
    return master


def rounded(values: Tensor, random_bits: Tensor) -> Tensor:
    out = torch.empty_like(values, dtype=BF16)
    bf16_codecs.stochastic_round_(values, out, random_bits)
    return out


# split: bf16 and the low half


def is_nan(patterns: NDArray[np.uint32]) -> NDArray[np.bool_]:
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


def test_split() -> None:
    """Law: the weight is the nearest bf16, half away; the remainder the low half.

    Decoded is what was encoded, bit for bit; a NaN gains bit 22 alone.
    """
    patterns = dense()
    weight, remainder = split(floats(patterns))
    np.testing.assert_array_equal(bits(weight), nearest_away(patterns))
    np.testing.assert_array_equal(bits(remainder), patterns.astype(np.uint16))
    np.testing.assert_array_equal(bits(joined(weight, remainder)), come_back(patterns))


def test_split_of_every_code() -> None:
    """Law: decoding and encoding give back each code that a master can have.

    The others decode to what does no harm: a zero weight to next to nothing, a NaN to
    NaN, an infinite weight with a positive remainder to NaN.
    """
    patterns = dense()
    weight = torch.from_numpy((patterns >> 16).astype(np.uint16).view(np.int16))
    remainder = torch.from_numpy(patterns.astype(np.uint16).view(np.int16))
    master = joined(weight.view(torch.bfloat16), remainder)
    again = split(master)

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


# kahan: bf16 and a compensation term


def test_kahan() -> None:
    """Law: the weight is torch's cast; the other torch's cast of what is missing.

    The sum of the two parts is an fp32 number: decoding rounds nothing. NaN are NaN
    with the sign they had; only the weight keeps that of a zero.
    """
    patterns = dense()
    master = floats(patterns)
    weight, compensation = kahan(master)
    nearest = master.bfloat16()
    nan = nearest.isnan()
    assert torch.equal(weight.isnan(), nan)
    np.testing.assert_array_equal(bits(weight[~nan]), bits(nearest[~nan]))
    np.testing.assert_array_equal(bits(weight[nan]) >> 15, patterns[nan.numpy()] >> 31)
    missing = (master.double() - nearest.double()).float().bfloat16()
    missing[~nearest.isfinite()] = 0
    np.testing.assert_array_equal(bits(compensation), bits(missing))
    back = added(weight, compensation)
    exact = weight.double() + compensation.double()
    assert torch.equal(back.double()[~nan], exact[~nan])
    assert back[nan].isnan().all()
    assert not back[master == 0].signbit().any()


# Random numbers, and rounding with them


def drawn(seed: int, step: int, index: int, stream: int, numel: int) -> list[Tensor]:
    words = bf16_codecs.key(seed, step, index, stream)
    return list(bf16_codecs.random_bits16(words, numel, "cpu"))


def test_random_numbers_stay() -> None:
    """Law: these are the numbers, past 2**32 and 2**64 too; a resumed run needs them.

    They were computed once by the kernel in C, which has an arithmetic of its own;
    that of splitmix64 is published.
    """
    assert bf16_codecs.splitmix(1234567) == 6457827717110365317
    words = bf16_codecs.key(-3, 2**64 + 5, 7, 1)
    high, low = bf16_codecs.random_bits16(words, 4, "cpu", 2**32 - 2)
    assert words == (3858987772, 2823142861)
    assert high.dtype is low.dtype is torch.int32
    assert high.tolist() == [25777, 48160, 45429, 12415]
    assert low.tolist() == [2284, 19388, 8093, 28723]


def test_keys_differ() -> None:
    """Law: each of the four counts, and so does their order."""
    numbers = list(itertools.product(range(6), repeat=4))
    assert len({bf16_codecs.key(*four) for four in numbers}) == len(numbers)
    for half in (0, 1):
        assert len({bf16_codecs.key(*four)[half] for four in numbers}) == len(numbers)


def test_chunks_are_the_whole() -> None:
    """Law: a tensor in chunks draws what it draws whole, and nothing from torch."""
    words, before = bf16_codecs.key(1, 2, 3, 0), torch.get_rng_state()
    whole = bf16_codecs.random_bits16(words, 1000, "cpu")
    sizes = [1, 2, 300, 697]
    starts = itertools.accumulate(sizes, initial=0)
    chunks = [
        bf16_codecs.random_bits16(words, size, "cpu", start)
        for size, start in zip(sizes, starts, strict=False)
    ]
    for half in (0, 1):
        assert torch.equal(torch.cat([chunk[half] for chunk in chunks]), whole[half])
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_uniform() -> None:
    """Law: each half falls into 256 bins alike, by high bits and by low bits.

    Chi-square of 255 degrees has mean 255 and variance 510; five deviations are allowed
    both ways, as draws may also be too even.
    """
    numel = 1 << 20
    halves = drawn(0, 0, 0, 0, numel)
    assert len(torch.unique(halves[0].long() << 16 | halves[1])) == numel
    for half in halves:
        for bins in (half >> 8, half & 0xFF):
            counts = torch.bincount(bins, minlength=256).double()
            chi_square = float((counts - numel / 256).square().sum() / (numel / 256))
            assert abs(chi_square - 255) < 5 * 510**0.5


def test_draws_are_independent() -> None:
    """Law: streams, steps, parameters, seeds, halves and neighbours do not correlate.

    Without correlation its estimate has a standard error of 1 / sqrt(n); 231 pairs are
    looked at, and five errors allowed.
    """
    numel = 1 << 16
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)]
    keys += [(0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 1, 1, 1)]
    rows = [half for four in keys for half in drawn(*four, numel)]
    rows += [rows[0].roll(1), rows[0].roll(256)]
    found = torch.corrcoef(torch.stack(rows).double())
    found.fill_diagonal_(0)
    assert found.shape == (22, 22)
    assert float(found.abs().max()) < 5 / numel**0.5


@pytest.mark.parametrize("draw", [0, 1, 0x1234, 0x7FFF, 0x8000, 0xFFFF])
def test_rounding(draw: int) -> None:
    """Law: the sum of the bits and the draw, cut off, and no finite number infinite.

    So of all 65536 draws as many round away from zero as the low half says. Infinities,
    zeros with their signs and every bf16 stay; so do NaN, whatever the draw: unguarded,
    0x7FFFFFFF becomes -0.0.
    """
    patterns = dense()
    values = floats(patterns)
    draws = torch.full(values.shape, draw, dtype=torch.int32)
    found = bits(rounded(values, draws)).astype(np.uint32)
    sign, size = patterns >> 16 & 0x8000, patterns & 0x7FFFFFFF
    cut = np.minimum((size + np.uint32(draw)) >> 16, np.maximum(0x7F7F, size >> 16))
    nan = is_nan(patterns)
    np.testing.assert_array_equal(found[~nan], (sign | cut)[~nan])
    assert is_nan(found[nan] << np.uint32(16)).all()
    np.testing.assert_array_equal(found[nan] >> 15, patterns[nan] >> 31)
    undrawn = bits(rounded(values, torch.zeros_like(draws)))
    np.testing.assert_array_equal(found[nan], undrawn[nan])


# All of them


def encode_all(values: Tensor) -> list[Tensor]:
    high, low = bf16_codecs.random_bits16((1, 2), values.numel(), values.device)
    parts, sums = split(values), kahan(values)
    drawn_ = rounded(values, high ^ low)
    return [*parts, joined(*parts), *sums, added(*sums), drawn_]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_shapes(shape: tuple[int, ...]) -> None:
    """Law: shape and strides do not matter; draws go to elements in their order."""
    values = torch.randn(shape)
    flat = encode_all(values.flatten())
    for found, expected in zip(encode_all(values), flat, strict=True):
        assert torch.equal(found.flatten(), expected)
    turned = values.T if values.dim() > 1 else values
    for codec in (lambda master: joined(*split(master)), lambda m: added(*kahan(m))):
        assert torch.equal(codec(turned), codec(turned.contiguous()))


WRITES: list[Callable[[Tensor, Tensor, Tensor], None]] = [
    bf16_codecs.split_encode_,
    bf16_codecs.kahan_encode_,
    lambda master, weight, _: bf16_codecs.stochastic_round_(
        master, weight, torch.zeros(3, dtype=torch.int32)
    ),
]


@pytest.mark.parametrize("write", WRITES)
def test_autograd_sees_writes(write: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Law: parameters are written in place, and their version counts it."""
    weight = nn.Parameter(torch.zeros(3, dtype=BF16))
    is_split = write is bf16_codecs.split_encode_
    extra = torch.zeros(3, dtype=torch.int16 if is_split else BF16)
    before = weight._version
    write(torch.ones(3), weight, extra)
    assert weight.tolist() == [1.0] * 3
    assert weight._version > before


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: a GPU gives the same bits, and NaN where there was NaN."""
    values = floats(dense())
    for found, expected in zip(
        encode_all(values.cuda()), encode_all(values), strict=True
    ):
        nan = expected.isnan()
        assert torch.equal(found.cpu().isnan(), nan)
        np.testing.assert_array_equal(bits(found.cpu()[~nan]), bits(expected[~nan]))

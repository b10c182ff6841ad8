"""bf16 weight and bf16 compensation: how close they keep a master, and what is lost.

The oracles are torch's casts and float64.
"""

from __future__ import annotations

from typing import Any

import codec_cases as cases
import pytest
import torch
from codec_cases import fresh_compiler_
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.masters import bf16_codecs

__all__ = ["fresh_compiler_"]
BF16 = torch.bfloat16


def dense() -> Tensor:
    """Return fp32 numbers with each high half."""
    return cases.floats(cases.dense())


def encoded(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and compensation of a master."""
    weight = torch.empty_like(master, dtype=BF16)
    compensation = torch.empty_like(master, dtype=BF16)
    bf16_codecs.kahan_encode_(master, weight, compensation)
    return weight, compensation


def decoded(weight: Tensor, compensation: Tensor) -> Tensor:
    """Return the master of a weight and compensation."""
    master = torch.empty_like(weight, dtype=torch.float32)
    bf16_codecs.kahan_decode_(weight, compensation, master)
    return master


def same_bits(found: Tensor, expected: Tensor) -> None:
    """Compare bf16 or fp32 bit for bit."""
    integer = torch.int16 if found.dtype is BF16 else torch.int32
    assert found.dtype is expected.dtype
    found, expected = found.cpu().view(integer), expected.cpu().view(integer)
    differs = int((found != expected).sum())
    assert torch.equal(found, expected), f"{differs} of {found.numel()} differ"


def same(found: Tensor, expected: Tensor) -> None:
    """Compare bit for bit where the expected is a number, else NaN with NaN."""
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    same_bits(found[~nan], expected[~nan])


def bound(master: Tensor) -> Tensor:
    """Return how far off a master may come back: see `bf16_codecs.kahan_encode_`."""
    fraction, exponent = torch.frexp(master.double())
    # frexp's fractions are from a half to 1, the format's from 1 to 2.
    one = torch.ones_like(fraction)
    return torch.ldexp(one, exponent - 1 - 17).clamp(2.0**-134)


def test_both_parts() -> None:
    """Law: the weight is torch's cast; the other torch's cast of what is missing."""
    master = dense()
    weight, compensation = encoded(master)
    nearest = master.bfloat16()
    same(weight, nearest)
    missing = (master.double() - nearest.double()).float().bfloat16()
    missing[~nearest.isfinite()] = 0
    same_bits(compensation, missing)


def test_the_truth_comes_back() -> None:
    """Law: off by at most 2**-17 of it, or 2**-134; both bounds are reached."""
    master = dense()
    weight, compensation = encoded(master)
    kept = weight.isfinite()
    master, back = master[kept], decoded(weight, compensation)[kept]
    error = (back.double() - master.double()).abs()
    assert bool((error <= bound(master)).all())
    normal = master.abs() >= 2.0**-117
    assert float((error / master.double().abs())[normal].max()) <= 2.0**-17
    assert bool((error == bound(master))[normal].any())
    assert bool((error == 2.0**-134)[~normal].any())


def test_a_whole_binade() -> None:
    """Law: the bound holds for each of the 2**23 numbers from 1 to 2."""
    master = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32)
    master = master.view(torch.float32)
    error = (decoded(*encoded(master)) - master).abs()
    assert float(error.max()) == 2.0**-17


def test_adding_is_exact() -> None:
    """Law: the sum of the two parts is an fp32 number; decoding rounds nothing."""
    weight, compensation = encoded(dense())
    kept = weight.isfinite()
    weight, compensation = weight[kept], compensation[kept]
    exact = weight.double() + compensation.double()
    assert torch.equal(decoded(weight, compensation).double(), exact)


def test_nothing_added_changes_nothing() -> None:
    """Law: a truth that came back once comes back equal for ever.

    Except for the last 2**-17 of what has a finite weight: it comes back as the least
    number that has an infinite one.
    """
    weight, compensation = encoded(dense())
    truth = decoded(weight, compensation)
    truth = truth[weight.isfinite() & (truth.abs() < float.fromhex("0x1.ffp127"))]
    assert torch.equal(decoded(*encoded(truth)), truth)
    assert len(truth) > 500_000


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_number(value: float) -> None:
    """Law: the bound holds wherever the weight is finite."""
    master = torch.tensor([value], dtype=torch.float32)
    weight, compensation = encoded(master)
    back = decoded(weight, compensation).double()
    if weight.isfinite():
        assert float((back - value).abs()) <= float(bound(master))
    else:
        assert abs(value) >= float.fromhex("0x1.ffp127")
        assert float(back) == float(weight)


@pytest.mark.parametrize(
    ("value", "weight", "compensation"),
    [
        (1.001, 1.0, 0.00099945068359375),
        (2.0**-149, 0.0, 0.0),
        (2.0**-134 * 1.5, 2.0**-133, 0.0),
        (-(2.0**-133), -(2.0**-133), 0.0),
        (3.4028234663852886e38, float("inf"), 0.0),
        (float("inf"), float("inf"), 0.0),
        (float("-inf"), float("-inf"), 0.0),
    ],
)
def test_edges(value: float, weight: float, compensation: float) -> None:
    """Law: what is too small is lost, what is too large is infinite, with no NaN."""
    found = encoded(torch.tensor([value]))
    assert [float(part) for part in found] == [weight, compensation]
    assert float(decoded(*found)) == weight + compensation


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, 0x7FC00000])
@pytest.mark.parametrize("sign", [0, -(1 << 31)])
def test_nan_stays_nan(pattern: int, sign: int) -> None:
    """Law: NaN is NaN in the weight with the sign it had, and when decoded."""
    master = torch.tensor([pattern + sign], dtype=torch.int32).view(torch.float32)
    weight, compensation = encoded(master)
    assert weight.isnan().all()
    assert bool(weight.view(torch.int16) < 0) == (sign < 0)
    assert not compensation.any()
    assert decoded(weight, compensation).isnan().all()


def test_zeros() -> None:
    """Law: a zero is a zero; only the weight keeps its sign."""
    weight, compensation = encoded(torch.tensor([0.0, -0.0]))
    assert weight.signbit().tolist() == [False, True]
    assert decoded(weight, compensation).signbit().tolist() == [False, False]


def step(weight: Tensor, compensation: Tensor, truth: Tensor, update: Tensor) -> None:
    """Add an update to what the two parts stand for."""
    bf16_codecs.kahan_decode_(weight, compensation, truth)
    truth.add_(update)
    bf16_codecs.kahan_encode_(truth, weight, compensation)


def trained(function: Any, values: Tensor, update: Tensor, steps: int) -> list[Tensor]:
    """Return weight, compensation and truth after some steps."""
    weight, compensation = encoded(values)
    truth = torch.zeros_like(values)
    for _ in range(steps):
        function(weight, compensation, truth, update)
    return [weight, compensation, truth]


def test_small_updates_count() -> None:
    """Law: a thousand times 0.001 makes 2.0 of 1.0; a plain bf16 stays where it is."""
    update = torch.tensor([0.001])
    weight, compensation, _ = trained(step, torch.ones(1), update, 1000)
    # Each step rounds twice below 2: to fp32, and as bounded.
    room = 1000 * (2.0**-24 + 2.0**-17)
    assert abs(float(decoded(weight, compensation)) - 2.0) <= room

    plain = torch.ones(1, dtype=BF16)
    for _ in range(1000):
        plain += update.bfloat16()
    assert float(plain) == 1.0


@cases.shapes
def test_shapes(shape: tuple[int, ...]) -> None:
    """Law: shape and strides do not matter; parameters are written in place."""
    master = cases.strided(shape)
    weight = nn.Parameter(torch.zeros(master.shape, dtype=BF16))
    compensation = torch.zeros(master.shape, dtype=BF16)
    version = weight._version
    bf16_codecs.kahan_encode_(master, weight, compensation)
    assert weight._version > version, "autograd must see that the weight changed"
    back = nn.Parameter(torch.zeros(master.shape))
    bf16_codecs.kahan_decode_(weight, compensation, back)
    assert bool(((back - master).abs().double() <= bound(master)).all())


@cases.backends
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(backend: str) -> None:
    """Law: a compiled step is an eager one, bit for bit; no rounding is dropped.

    But for the payload of a NaN: the sum of two has that of either.
    """
    values = dense()[:-3]  # odd: a vectorised loop has a rest
    update = values * 2.0**-10
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for found, expected in zip(
        trained(compiled, values, update, 3),
        trained(step, values, update, 3),
        strict=True,
    ):
        same(found, expected)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: a GPU gives the same bits, and NaN where there was NaN."""
    values = dense()
    update = values * 2.0**-10
    there = trained(step, values.cuda(), update.cuda(), 3)
    for found, expected in zip(there, trained(step, values, update, 3), strict=True):
        same(found.cpu(), expected)

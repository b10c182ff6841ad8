"""Stochastic rounding: its random numbers beside numpy's integers, its odds by count.

Whoever changes a number here changes the course of every run that is resumed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import codec_cases as cases
import numpy as np
import pytest
import torch
from codec_cases import floats, fresh_compiler_
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from halfstep.masters import bf16_codecs

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["fresh_compiler_"]
BF16 = torch.bfloat16
ALL = 1 << 16
DRAWS = torch.arange(ALL, dtype=torch.int32)
WORDS = st.integers(0, 2**32 - 1)


def rounded(values: Tensor, sixteen: Tensor) -> Tensor:
    """Return values rounded with these draws."""
    out = torch.empty_like(values, dtype=BF16)
    bf16_codecs.stochastic_round_(values, out, sixteen)
    return out


def drawn(seed: int, step: int, index: int, stream: int, numel: int) -> list[Tensor]:
    """Return both halves of one tensor's random numbers."""
    words = bf16_codecs.key(seed, step, index, stream)
    return list(bf16_codecs.random_bits16(words, numel, "cpu"))


# The twins, in numpy


def twin_key(*numbers: int) -> tuple[int, int]:
    """Return the key in uint64 that wraps by itself."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state ^= np.array([number % 2**64], dtype=np.uint64)
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    low, high = state.view(np.dtype("<u4")).tolist()
    return low, high


def twin_mix(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Scramble in uint32 that wraps by itself."""
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    words = (words ^ words >> np.uint32(15)) * np.uint32(0x735A2D97)
    return words ^ words >> np.uint32(15)


def twin_random(words: tuple[int, int], numel: int, start: int) -> NDArray[np.uint32]:
    """Return the 32 bits of each element."""
    numbers = (start + np.arange(numel, dtype=np.uint64)).astype(np.uint32)
    return twin_mix(twin_mix(numbers + np.uint32(words[0])) ^ np.uint32(words[1]))


def undone(mixed: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Take back `mix`, step by step."""
    for shift, factor in ((15, 0x735A2D97), (15, 0x21F0AAAD)):
        mixed = mixed ^ mixed >> np.uint32(shift) ^ mixed >> np.uint32(2 * shift)
        mixed = mixed * np.uint32(pow(factor, -1, 2**32))
    return mixed ^ mixed >> np.uint32(16)


# The random numbers


@pytest.mark.parametrize(
    ("drawn_before", "number"),
    [
        (0, 6457827717110365317),
        (1, 3203168211198807973),
        (2, 9817491932198370423),
    ],
)
def test_splitmix(drawn_before: int, number: int) -> None:
    """Law: it is splitmix64, by the numbers published for the seed 1234567."""
    state = (1234567 + drawn_before * 0x9E3779B97F4A7C15) % 2**64
    assert bf16_codecs.splitmix(state) == number


@given(*[st.integers(-(2**70), 2**70)] * 4)
def test_key_is_its_twin(seed: int, step: int, index: int, stream: int) -> None:
    """Law: any four integers give two words, the twin's."""
    words = bf16_codecs.key(seed, step, index, stream)
    assert words == twin_key(seed, step, index, stream)
    assert all(0 <= word < 2**32 for word in words)


def test_keys_differ() -> None:
    """Law: each of the four counts, and so does their order."""
    numbers = list(itertools.product(range(6), repeat=4))
    assert len({bf16_codecs.key(*four) for four in numbers}) == len(numbers)
    for half in (0, 1):
        assert len({bf16_codecs.key(*four)[half] for four in numbers}) == len(numbers)


def test_mix_is_its_twin_and_one_to_one() -> None:
    """Law: arithmetic modulo 2**32, of which every step can be taken back."""
    generator = np.random.default_rng(0)
    words = generator.integers(2**32, size=100_003, dtype=np.uint32)
    words[:6] = [0, 1, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF]
    given_words = torch.from_numpy(words.astype(np.int64))
    mixed = bf16_codecs.mix(given_words).numpy()
    np.testing.assert_array_equal(mixed, twin_mix(words))
    np.testing.assert_array_equal(undone(mixed.astype(np.uint32)), words)
    np.testing.assert_array_equal(given_words.numpy(), words, "the argument changed")


@given(WORDS, WORDS, st.integers(0, 40), st.integers(0, 2**34))
def test_random16_is_its_twin(first: int, second: int, numel: int, start: int) -> None:
    """Law: for any key, length and start, past 2**32 too."""
    words = (first, second)
    high, low = bf16_codecs.random_bits16(words, numel, "cpu", start)
    expected = twin_random(words, numel, start)
    assert high.dtype is low.dtype is torch.int32
    np.testing.assert_array_equal(high.numpy(), expected >> np.uint32(16))
    np.testing.assert_array_equal(low.numpy(), expected & np.uint32(0xFFFF))


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


# The rounding


@pytest.mark.parametrize("low", [0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
@pytest.mark.parametrize("high", [0x0000, 0x007F, 0x3F80, 0x7F7E, 0x8000, 0xC2AB])
def test_the_odds(high: int, low: int) -> None:
    """Law: of all 65536 draws as many round away from zero as the low half says."""
    values = floats([high << 16 | low]).expand(ALL).contiguous()
    found = rounded(values, DRAWS).view(torch.int16).to(torch.int32) & 0xFFFF
    assert int((found == high + 1).sum()) == low
    assert int((found == high).sum()) == ALL - low


@pytest.mark.parametrize("low", [0, 1, 0x8000, 0xFFFF])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_never_infinite(sign: int, low: int) -> None:
    """Law: no draw takes a finite number beyond the largest bf16."""
    values = floats([(0x7F7F | sign) << 16 | low]).expand(ALL).contiguous()
    largest = torch.finfo(BF16).max
    assert set(rounded(values, DRAWS).tolist()) == {-largest if sign else largest}


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0x7FBFFFFF])
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_nan_stays_nan(pattern: int, sign: int) -> None:
    """Law: whatever the draw; unguarded, 0x7FFFFFFF becomes -0.0."""
    values = floats([pattern | sign]).expand(ALL).contiguous()
    found = rounded(values, DRAWS)
    assert found.isnan().all()
    assert len(found.view(torch.int16).unique()) == 1, "its bits hang on the draw"
    assert bool((found.view(torch.int16) < 0).all()) == bool(sign)


def test_what_needs_no_rounding() -> None:
    """Law: infinities, zeros with their signs, and every bf16 stay what they are."""
    patterns = np.arange(ALL, dtype=np.uint32) << np.uint32(16)
    values = torch.from_numpy(patterns.view(np.int32)).view(torch.float32)
    kept = ~values.isnan()
    for draw in (0, 1, 0x8000, 0xFFFF):
        found = rounded(values, torch.full_like(DRAWS, draw))[kept]
        expected = torch.from_numpy((patterns >> 16).astype(np.uint16).view(np.int16))
        assert torch.equal(found.view(torch.int16), expected[kept])


@given(WORDS, st.integers(0, 0xFFFF))
def test_any_number(pattern: int, draw: int) -> None:
    """Law: the sum of the bits and the draw, cut off, but for the guards."""
    value = floats([pattern])
    found = rounded(value, torch.tensor([draw], dtype=torch.int32))
    if value.isnan():
        assert found.isnan().all()
    else:
        sign, size = pattern & 0x80000000, pattern & 0x7FFFFFFF
        largest = max(0x7F7F, size >> 16)
        expected = sign >> 16 | min((size + draw) >> 16, largest)
        assert int(found.view(torch.int16)) & 0xFFFF == expected


def test_the_mean_is_the_value() -> None:
    """Law: the mean of n is within 4 standard errors, each ulp * sqrt(p (1-p) / n)."""
    numel, ulp = 1 << 16, 2.0**-7
    shares = torch.linspace(0.001, 0.999, 33)
    for step, share in enumerate(shares.tolist()):
        value = torch.tensor(1 + share * ulp)
        exact = (value.double() - 1) / ulp
        values = value.expand(numel).contiguous()
        for half in drawn(7, step, 0, 0, numel):
            mean = rounded(values, half).double().mean()
            error = ulp * (exact * (1 - exact) / numel).sqrt()
            assert abs(float(mean - value.double())) < 4 * float(error)


def test_small_updates_count() -> None:
    """Law: a thousand times 0.001 makes 2.0 of 1.0 on average, and each by itself.

    A step from a bf16 rounds up with chance p = update / ulp and adds the variance
    ulp**2 p (1-p) = update * ulp - update**2, with an ulp of 2**-7 below 2 and of 2**-6
    above. A sample deviation of n is itself known to 1 / sqrt(2 n). fp32 sums are off
    by 2**-24 each, 2**-23 above 2.
    """
    numel, steps, update = 1000, 1000, 0.001
    weight, plain = torch.ones(numel, dtype=BF16), torch.ones(numel, dtype=BF16)
    for step in range(steps):
        high, _ = bf16_codecs.random_bits16(
            bf16_codecs.key(3, step, 0, 0), numel, "cpu"
        )
        bf16_codecs.stochastic_round_(weight.float() + update, weight, high)
        plain = (plain.float() + update).bfloat16()
    least, most = (
        (steps * (update * ulp - update**2)) ** 0.5 for ulp in (2.0**-7, 2.0**-6)
    )
    found, room = weight.double(), steps * 2.0**-23
    assert abs(float(found.mean()) - 2.0) < 4 * most / numel**0.5 + room
    allowed = 4 / (2 * numel) ** 0.5
    assert least * (1 - allowed) < float(found.std()) < most * (1 + allowed)
    assert float(plain.max()) == 1.0


@cases.shapes
def test_shapes(shape: tuple[int, ...]) -> None:
    """Law: draws go to elements in their order; parameters are written in place."""
    values = torch.randn(shape)
    high, _ = bf16_codecs.random_bits16((1, 2), values.numel(), "cpu")
    out = nn.Parameter(torch.zeros(shape, dtype=BF16))
    version = out._version
    bf16_codecs.stochastic_round_(values, out, high)
    assert out._version > version, "autograd must see that the weight changed"
    flat = rounded(values.flatten(), high)
    assert torch.equal(out.flatten(), flat)


def fused(values: Tensor, out: Tensor, words: tuple[int, int], start: int) -> None:
    """Draw and round, for a compiler to fuse."""
    high, low = bf16_codecs.random_bits16(words, values.numel(), values.device, start)
    bf16_codecs.stochastic_round_(values, out, high ^ low)


def steps_of(function: Any, device: str = "cpu") -> list[Tensor]:
    """Return the bits that some steps give on tensors of two sizes."""
    found = []
    for step in range(12):
        values = torch.randn(4099 if step % 2 else 33, device="cpu").to(device)
        values[:3] = floats([0x7FFFFFFF, 0x7F7FFFFF, 0xFF800000])
        out = torch.zeros_like(values, dtype=BF16)
        function(values, out, bf16_codecs.key(5, step, 0, 0), 2**32 - 3 + step)
        found.append(out.view(torch.int16).cpu())
    return found


@cases.backends
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(backend: str) -> None:
    """Law: compiled is eager, bit for bit, and a new key compiles nothing anew.

    The first step compiles for its numbers, the second for any.
    """
    counter = CompileCounterWithBackend(backend)
    torch.manual_seed(0)
    expected = steps_of(fused)
    torch.manual_seed(0)
    found = steps_of(torch.compile(fused, backend=counter, fullgraph=True))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert counter.frame_count == 2


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: a GPU draws and rounds the same."""
    torch.manual_seed(0)
    expected = steps_of(fused)
    torch.manual_seed(0)
    for ours, theirs in zip(steps_of(fused, "cuda"), expected, strict=True):
        assert torch.equal(ours, theirs)

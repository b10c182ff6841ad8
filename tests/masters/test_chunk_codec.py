"""The quick way to round a chunk has the bits of the careful one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kernel_twin as twin
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.masters import chunk_codec, kahan_codec, split_codec, stochastic_codec

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

LOW = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
"""Low halves at which roundings to bf16 turn."""
EXTRA = {split_codec: torch.int16, kahan_codec: torch.bfloat16}

every_room = pytest.mark.parametrize("room", list(EXTRA), ids=["split", "kahan"])


def every_high() -> Tensor:
    """Return each high half of an fp32 number, as int32."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16


def chunks() -> list[Tensor]:
    """Return finite numbers, ones up to the largest fp32, and such with inf and NaN."""
    numbers = torch.cat([every_high() | word for word in LOW]).view(torch.float32)
    finite = numbers[numbers.isfinite()]
    small = finite[finite.abs() < 2.0**100]
    large = finite[finite > 2.0**127]
    return [small, *large[large.argsort()].split(1), finite, numbers]


@every_room
def test_encode(room: ModuleType) -> None:
    """Law: weight and rest are those of the split and Kahan codecs."""
    for numbers in chunks():
        kinds = (torch.bfloat16, EXTRA[room])
        mine = [torch.empty(numbers.shape, dtype=kind) for kind in kinds]
        right = [torch.empty(numbers.shape, dtype=kind) for kind in kinds]
        chunk_codec.encode_(numbers, *mine)
        room.encode_(numbers, *right)
        for one, other in zip(mine, right, strict=True):
            assert twin.same_bits(one, other)


@every_room
def test_decode(room: ModuleType) -> None:
    """Law: the truth is theirs too, with rests that nothing encodes."""
    weights = (every_high() >> 16).to(torch.int16).view(torch.bfloat16)
    for rest in (0, 1, 0x3F80, 0x7FFF, -0x8000, -0x4080, -1):
        extra = torch.full(weights.shape, rest, dtype=torch.int16).view(EXTRA[room])
        finite = weights.isfinite() & extra.isfinite()
        for chosen in (finite & (weights != 0), finite, torch.ones_like(finite)):
            mine = torch.empty(int(chosen.sum()))
            right = torch.empty_like(mine)
            chunk_codec.decode_(weights[chosen], extra[chosen], mine)
            room.decode_(weights[chosen], extra[chosen], right)
            assert twin.same_bits(mine, right)


@pytest.mark.parametrize("draw", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_round(draw: int) -> None:
    """Law: random rounding is that of the stochastic codec, at the largest bf16 too."""
    for numbers in chunks():
        sixteen = torch.full(numbers.shape, draw, dtype=torch.int32)
        mine = torch.empty(numbers.shape, dtype=torch.bfloat16)
        right = torch.empty_like(mine)
        chunk_codec.round_(numbers, mine, sixteen)
        stochastic_codec.round_(numbers, right, sixteen)
        assert twin.same_bits(mine, right)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_any_bits(words: list[int]) -> None:
    """Law: so it is for any fp32 numbers together."""
    numbers = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    for room, kind in EXTRA.items():
        mine = [torch.empty(len(words), dtype=d) for d in (torch.bfloat16, kind)]
        right = [torch.empty_like(tensor) for tensor in mine]
        chunk_codec.encode_(numbers, *mine)
        room.encode_(numbers, *right)
        decoded = torch.empty(len(words)), torch.empty(len(words))
        chunk_codec.decode_(*mine, decoded[0])
        room.decode_(*right, decoded[1])
        for one, other in zip([*mine, decoded[0]], [*right, decoded[1]], strict=True):
            assert twin.same_bits(one, other)


def test_careful_way_is_not_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: finite chunks do without the careful way, or nothing here was compared."""
    for room, kind in EXTRA.items():
        for name in ("encode_", "decode_"):
            monkeypatch.delattr(room, name)
        truth = chunks()[0]
        weight = torch.empty(truth.shape, dtype=torch.bfloat16)
        extra = torch.empty(truth.shape, dtype=kind)
        chunk_codec.encode_(truth, weight, extra)
        chunk_codec.decode_(weight, extra, torch.empty(truth.shape))
    monkeypatch.delattr(stochastic_codec, "round_")
    chunk_codec.round_(truth, weight, torch.zeros(truth.shape, dtype=torch.int32))

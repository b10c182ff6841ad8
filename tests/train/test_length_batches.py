"""Batches by length and shares of ranks, each beside a slow twin."""

import hashlib
import math
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.data.length_batches import (
    Indices,
    epoch,
    ordered,
    share,
    token_batches,
)

lengths_lists = st.lists(st.integers(0, 60), max_size=200)
sizes = st.integers(1, 40)


def lists(made: list[Indices]) -> list[list[int]]:
    return [batch.tolist() for batch in made]


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


@given(lengths_lists, sizes, st.integers(0, 99), st.integers(0, 99))
def test_an_epoch_is_its_slow_twin(
    lengths: list[int], size: int, seed: int, number: int
) -> None:
    """Law: shuffle, pool, sort, cut, shuffle; drawn by Philox, keyed with SHA-256.

    Epochs that end within the first 200 steps are not sorted.
    """
    steps = (number + 1) * math.ceil(len(lengths) / size)
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    key = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    draw = np.random.Philox(key=np.array(key, np.uint64))
    keys = [int(draw.random_raw()) for _ in lengths]
    order = sorted(range(len(lengths)), key=keys.__getitem__)
    expected: list[list[int]] = []
    while order:
        pooled, order = order[: 50 * size], order[50 * size :]
        if steps > 200:
            pooled.sort(key=lengths.__getitem__)
        while pooled:
            expected.append(pooled[:size])
            pooled = pooled[size:]
    keys = [int(draw.random_raw()) for _ in expected]
    turns = sorted(range(len(expected)), key=keys.__getitem__)
    got = epoch(array(lengths), size, seed=seed, number=number)
    assert lists(got) == [expected[turn] for turn in turns]


@given(lengths_lists, sizes)
def test_evaluation_goes_from_long_to_short(lengths: list[int], size: int) -> None:
    """Law: ordered batches partition the indices, longest first, full but the last."""
    made = lists(ordered(array(lengths), size))
    assert sorted(chain(*made)) == list(range(len(lengths)))
    along = [lengths[index] for index in chain(*made)]
    assert along == sorted(lengths, reverse=True)
    assert all(len(batch) == size for batch in made[:-1])
    assert all(made)


@given(st.data(), lengths_lists, st.integers(1, 9))
def test_shares_part_a_batch_evenly(
    data: st.DataObject, lengths: list[int], world: int
) -> None:
    """Law: disjoint, together the batch, counts within 1, loads within the longest."""
    batch = data.draw(st.permutations(range(len(lengths))))
    batch = batch[: data.draw(st.integers(0, len(batch)))]
    told = array(batch), array(lengths)
    parts = [share(*told, rank, world).tolist() for rank in range(world)]
    assert sorted(chain(*parts)) == sorted(batch)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[index] for index in part) for part in parts]
    longest = max((lengths[index] for index in batch), default=0)
    assert max(loads) - min(loads) <= longest


def test_batches_of_tokens() -> None:
    """Law: each text is in one batch, which holds so many tokens or a longer text."""
    lengths = np.array([3, 90, 1, 40, 7, 0, 3, 200] * 9)
    batches = token_batches(lengths, 100)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    longest = [int(lengths[batch].max()) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    for batch, most in zip(batches, longest, strict=True):
        assert len(batch) * most <= 100 or len(batch) == 1
    assert len(batches) < 9 * 4
    assert token_batches(lengths[:0], 100) == []

"""Batches by length and shares of ranks, each beside a slow twin."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.data.length_batches import POOL, Epoch, epoch, ordered, share

lengths_lists = st.lists(st.integers(0, 60), max_size=200)
sizes = st.integers(1, 40)


def lists(made: Epoch) -> list[list[int]]:
    """Return the batches as lists."""
    return [batch.tolist() for batch in made]


def flat(parts: list[list[int]]) -> list[int]:
    """Return all items, one list after another."""
    return [item for part in parts for item in part]


def array(numbers: list[int]) -> np.ndarray:
    """Return whole numbers, none included, as an array."""
    return np.array(numbers, np.int64)


@given(lengths_lists, sizes, st.integers(), st.integers(0, 99), st.integers(1, 5))
def test_an_epoch_holds_every_index_once(
    lengths: list[int], size: int, seed: int, number: int, pool: int
) -> None:
    """Law: batches partition the indices; all are full but one at most."""
    made = epoch(array(lengths), size, seed=seed, number=number, pool=pool)
    assert sorted(flat(lists(made))) == list(range(len(lengths)))
    full, rest = divmod(len(lengths), size)
    assert Counter(map(len, made)) == Counter([size] * full + [rest] * (rest > 0))
    assert len(made) == len(lists(made))


@given(lengths_lists, sizes, st.integers(0, 99), st.integers(0, 99), st.integers(1, 5))
def test_an_epoch_is_its_slow_twin(
    lengths: list[int], size: int, seed: int, number: int, pool: int
) -> None:
    """Law: shuffle, pool, sort, cut, shuffle; drawn by Philox, keyed with SHA-256."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    key = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    draw = np.random.Philox(key=np.array(key, np.uint64))
    keys = [int(draw.random_raw()) for _ in lengths]
    order = sorted(range(len(lengths)), key=keys.__getitem__)
    expected: list[list[int]] = []
    while order:
        pooled, order = order[: pool * size], order[pool * size :]
        pooled.sort(key=lengths.__getitem__)
        while pooled:
            expected.append(pooled[:size])
            pooled = pooled[size:]
    keys = [int(draw.random_raw()) for _ in expected]
    turns = sorted(range(len(expected)), key=keys.__getitem__)
    got = epoch(array(lengths), size, seed=seed, number=number, pool=pool)
    assert lists(got) == [expected[turn] for turn in turns]


def test_seed_and_number_make_the_order() -> None:
    """Law: same arguments, same batches; another seed or number, others."""
    lengths = array([index % 17 for index in range(500)])
    base = lists(epoch(lengths, 8, seed=3, number=0))
    assert base == lists(epoch(lengths, 8, seed=3, number=0))
    assert base == lists(epoch(lengths, 8, seed=3, number=0, pool=POOL))
    assert base != lists(epoch(lengths, 8, seed=3, number=0, pool=POOL - 1))
    seen = [
        sorted(map(tuple, epoch(lengths, 8, seed=seed, number=number)))
        for seed, number in [(3, 0), (3, 1), (4, 0), (0, 3), (30, 0), (-3, 0)]
    ]
    assert all(seen.count(one) == 1 for one in seen)


def test_an_epoch_leaves_no_trace() -> None:
    """Law: nobody else's generator is read or moved, and lengths stay as they are."""
    lengths = array([1, 2, 3] * 20)
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = lists(epoch(lengths, 4, seed=1, number=0))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert lengths.tolist() == [1, 2, 3] * 20
    random.seed(6)
    np.random.seed(6)  # noqa: NPY002
    assert lists(epoch(lengths, 4, seed=1, number=0)) == first


def test_batches_hold_like_lengths_in_random_order() -> None:
    """Law: a pool of all rows pads least, and short batches do not come first."""
    lengths = array([index % 64 for index in range(640)])
    made = epoch(lengths, 10, seed=0, number=0, pool=64)
    assert all(len({*lengths[batch].tolist()}) == 1 for batch in made)
    order = [int(lengths[batch[0]]) for batch in made]
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


def test_a_pool_bounds_what_is_sorted() -> None:
    """Law: with a pool of one batch, batches are random in length."""
    made = epoch(np.arange(1000), 10, seed=0, number=0, pool=1)
    assert max(batch.max() - batch.min() for batch in made) > 500


@given(lengths_lists, sizes)
def test_evaluation_goes_from_long_to_short(lengths: list[int], size: int) -> None:
    """Law: ordered batches partition the indices, longest first, full but the last."""
    made = lists(ordered(array(lengths), size))
    assert sorted(flat(made)) == list(range(len(lengths)))
    along = [lengths[index] for index in flat(made)]
    assert along == sorted(lengths, reverse=True)
    assert all(len(batch) == size for batch in made[:-1])
    assert all(made)


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_nothing_is_our_mistake(size: int) -> None:
    """Law: a size below 1 fails and never drops the data in silence."""
    with pytest.raises(AssertionError):
        ordered(array([1, 2]), size)
    with pytest.raises(AssertionError):
        epoch(array([1, 2]), size, seed=0, number=0)


@given(st.data(), lengths_lists, st.integers(1, 9))
def test_shares_part_a_batch_evenly(
    data: st.DataObject, lengths: list[int], world: int
) -> None:
    """Law: disjoint, together the batch, counts within 1, loads within the longest."""
    batch = data.draw(st.permutations(range(len(lengths))))
    batch = batch[: data.draw(st.integers(0, len(batch)))]
    told = array(batch), array(lengths)
    parts = [share(*told, rank, world).tolist() for rank in range(world)]
    assert sorted(flat(parts)) == sorted(batch)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[index] for index in part) for part in parts]
    longest = max((lengths[index] for index in batch), default=0)
    assert max(loads) - min(loads) <= longest


def test_a_share_by_hand() -> None:
    """Law: by length, every second one; a rank may go empty."""
    lengths, batch = array([50, 10, 40, 20, 30]), np.arange(5)
    assert share(batch, lengths, 0, 2).tolist() == [1, 4, 0]
    assert share(batch, lengths, 1, 2).tolist() == [3, 2]
    assert share(array([2]), lengths, 1, 2).tolist() == []


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_our_mistake(rank: int) -> None:
    """Law: a rank that is not there fails and takes nobody's share."""
    with pytest.raises(AssertionError):
        share(array([0, 1]), array([1, 1]), rank, 2)

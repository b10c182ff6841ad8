"""Batches by length, shares of ranks, and padded tensors, each beside a slow twin."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.batches import Encoded, batches, ordered_batches, share

lengths_lists = st.lists(st.integers(0, 60), max_size=200)
sizes = st.integers(1, 40)


def flat(lists: list[list[int]]) -> list[int]:
    """Return all items, one list after another."""
    return [item for each in lists for item in each]


@given(lengths_lists, sizes, st.integers(), st.integers(0, 99), st.integers(1, 5))
def test_an_epoch_holds_every_index_once(
    lengths: list[int], size: int, seed: int, epoch: int, pool: int
) -> None:
    """Law: batches partition the indices; all are full but one at most."""
    made = batches(lengths, size, seed=seed, epoch=epoch, pool=pool)
    assert sorted(flat(made)) == list(range(len(lengths)))
    full, rest = divmod(len(lengths), size)
    assert Counter(map(len, made)) == Counter([size] * full + [rest] * (rest > 0))


@given(lengths_lists, sizes, st.integers(0, 99), st.integers(0, 99), st.integers(1, 5))
def test_an_epoch_is_its_slow_twin(
    lengths: list[int], size: int, seed: int, epoch: int, pool: int
) -> None:
    """Law: shuffle, pool, sort, cut, shuffle; drawn by SHA-512 of seed and epoch."""
    word = f"{seed} {epoch}".encode()
    number = int.from_bytes(word + hashlib.sha512(word).digest(), "big")
    draw = random.Random(number)  # noqa: S311 - an order is no secret
    order = list(range(len(lengths)))
    draw.shuffle(order)
    expected: list[list[int]] = []
    while order:
        pooled, order = order[: pool * size], order[pool * size :]
        keyed = sorted((lengths[i], place, i) for place, i in enumerate(pooled))
        while keyed:
            expected.append([i for _, _, i in keyed[:size]])
            keyed = keyed[size:]
    draw.shuffle(expected)
    got = batches(lengths, size, seed=seed, epoch=epoch, pool=pool)
    assert got == expected


def test_seed_and_epoch_make_the_order() -> None:
    """Law: same arguments, same batches; another seed or epoch, others."""
    lengths = [index % 17 for index in range(500)]
    base = batches(lengths, 8, seed=3, epoch=0)
    assert base == batches(lengths, 8, seed=3, epoch=0)
    assert base == batches(lengths, 8, seed=3, epoch=0, pool=50)
    assert base != batches(lengths, 8, seed=3, epoch=0, pool=49)
    seen = [
        sorted(map(tuple, batches(lengths, 8, seed=seed, epoch=epoch)))
        for seed, epoch in [(3, 0), (3, 1), (4, 0), (0, 3), (30, 0), (-3, 0)]
    ]
    assert all(seen.count(one) == 1 for one in seen)


def test_batches_leave_no_trace() -> None:
    """Law: a pure function neither reads nor moves Python's own generator."""
    random.seed(5)
    state = random.getstate()
    first = batches([1, 2, 3] * 20, 4, seed=1, epoch=0)
    assert random.getstate() == state
    random.seed(6)
    assert batches([1, 2, 3] * 20, 4, seed=1, epoch=0) == first


def test_batches_hold_like_lengths_in_random_order() -> None:
    """Law: a pool of all rows pads least, and short batches do not come first."""
    lengths = [index % 64 for index in range(640)]
    made = batches(lengths, 10, seed=0, epoch=0, pool=64)
    assert all(len({lengths[i] for i in batch}) == 1 for batch in made)
    order = [lengths[batch[0]] for batch in made]
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


def test_a_pool_bounds_what_is_sorted() -> None:
    """Law: with a pool of one batch, batches are random in length."""
    lengths = list(range(1000))
    made = batches(lengths, 10, seed=0, epoch=0, pool=1)
    assert max(max(batch) - min(batch) for batch in made) > 500


@given(lengths_lists, sizes)
def test_evaluation_goes_from_long_to_short(lengths: list[int], size: int) -> None:
    """Law: ordered batches partition the indices, longest first, full but the last."""
    made = ordered_batches(lengths, size)
    assert sorted(flat(made)) == list(range(len(lengths)))
    along = [lengths[index] for index in flat(made)]
    assert along == sorted(lengths, reverse=True)
    assert all(len(batch) == size for batch in made[:-1])
    assert all(made)


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_nothing_is_our_mistake(size: int) -> None:
    """Law: a size below 1 fails and never drops the data in silence."""
    with pytest.raises(AssertionError):
        ordered_batches([1, 2], size)
    with pytest.raises(AssertionError):
        batches([1, 2], size, seed=0, epoch=0, pool=1)


@given(st.data(), lengths_lists, st.integers(1, 9))
def test_shares_part_a_batch_evenly(
    data: st.DataObject, lengths: list[int], world: int
) -> None:
    """Law: disjoint, together the batch, counts within 1, loads within the longest."""
    batch = data.draw(st.permutations(range(len(lengths))))
    batch = batch[: data.draw(st.integers(0, len(batch)))]
    parts = [share(batch, lengths, rank, world) for rank in range(world)]
    assert sorted(flat(parts)) == sorted(batch)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[index] for index in part) for part in parts]
    longest = max((lengths[index] for index in batch), default=0)
    assert max(loads) - min(loads) <= longest


def test_a_share_by_hand() -> None:
    """Law: by length, every second one; a rank may go empty."""
    lengths = [50, 10, 40, 20, 30]
    assert share([0, 1, 2, 3, 4], lengths, 0, 2) == [1, 4, 0]
    assert share([0, 1, 2, 3, 4], lengths, 1, 2) == [3, 2]
    assert share([2], lengths, 1, 2) == []


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_our_mistake(rank: int) -> None:
    """Law: a rank that is not there fails and takes nobody's share."""
    with pytest.raises(AssertionError):
        share([0, 1], [1, 1], rank, 2)


token_lists = st.lists(
    st.lists(st.integers(0, 2**31 - 1), max_size=30), min_size=1, max_size=20
)


@given(st.data(), token_lists, st.integers(-1, 2**31), st.integers(1, 16))
def test_collate_is_its_slow_twin(
    data: st.DataObject, tokens: list[list[int]], pad_id: int, multiple: int
) -> None:
    """Law: rows hold tokens, then padding, up to the next multiple of the longest."""
    labels = [7 * index for index in range(len(tokens))]
    encoded = Encoded.build(tokens, labels)
    chosen = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=20))
    got = encoded.collate(chosen, pad_id, multiple)
    width = multiple
    while width < max((len(tokens[index]) for index in chosen), default=0):
        width += multiple
    assert list(got) == ["input_ids", "attention_mask", "labels"]
    assert all(tensor.dtype == torch.int64 for tensor in got.values())
    assert got["input_ids"].shape == (len(chosen), width)
    assert got["attention_mask"].shape == (len(chosen), width)
    assert got["input_ids"].tolist() == [
        tokens[index] + [pad_id] * (width - len(tokens[index])) for index in chosen
    ]
    assert got["attention_mask"].tolist() == [
        [1] * len(tokens[index]) + [0] * (width - len(tokens[index]))
        for index in chosen
    ]
    assert got["labels"].tolist() == [labels[index] for index in chosen]


def test_storage_by_hand() -> None:
    """Law: ids lie flat, starts mark them, each tensor has its promised dtype."""
    encoded = Encoded.build([[5, 6], [], [7]], [1, 0, 2])
    assert encoded.ids.tolist() == [5, 6, 7]
    assert encoded.starts.tolist() == [0, 2, 2, 3]
    assert encoded.labels.tolist() == [1, 0, 2]
    assert encoded.lengths == [2, 0, 1]
    assert [encoded.ids.dtype, encoded.starts.dtype, encoded.labels.dtype] == [
        torch.int32,
        torch.int64,
        torch.int64,
    ]


def test_the_default_width_is_a_multiple_of_eight() -> None:
    """Law: 8 tokens take 8 places, 9 take 16."""
    encoded = Encoded.build([[1] * 8, [1] * 9], [0, 1])
    assert encoded.collate([0], 0)["input_ids"].shape == (1, 8)
    assert encoded.collate([1, 0], 0)["input_ids"].shape == (2, 16)


def test_a_batch_is_a_copy() -> None:
    """Law: what a step writes into its batch does not reach the storage."""
    encoded = Encoded.build([[1] * 8], [3])
    batch = encoded.collate([0], 0)
    for tensor in batch.values():
        tensor.fill_(9)
    assert encoded.ids.tolist() == [1] * 8
    assert encoded.labels.tolist() == [3]


def test_nothing_at_all_is_stored_too() -> None:
    """Law: an empty split has storage, and its empty batch has shape."""
    encoded = Encoded.build([], [])
    assert encoded.lengths == []
    assert encoded.starts.tolist() == [0]
    shapes = {name: tuple(part.shape) for name, part in encoded.collate([], 0).items()}
    assert shapes == {"input_ids": (0, 8), "attention_mask": (0, 8), "labels": (0,)}


def test_storage_refuses_what_it_cannot_hold() -> None:
    """Law: no token is wrapped, no label slips, no field is set anew."""
    with pytest.raises(OverflowError):
        Encoded.build([[2**31]], [0])
    with pytest.raises(AssertionError):
        Encoded.build([[1], [2]], [0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        Encoded.build([[1]], [0]).ids = torch.zeros(1)  # type: ignore[misc]

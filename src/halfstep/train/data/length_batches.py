"""Batches of examples of similar length, in an order that a resumed run reproduces.

In: the length of every example. Out: for one epoch, the indices of each batch; and a
process's part of a batch.

Why: a text padded to the longest of its batch costs as much as the longest. Among
texts of like length little is padding; and the order must still be random. Everything
is held in flat arrays, 8 bytes an example and 8 a batch: an epoch of a million
examples in batches of 32 takes 8.25 MB.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

POOL = 50
"""Batches sorted together: enough for batches of one length, few beside an epoch."""


@dataclass(frozen=True, eq=False)
class Epoch:
    """The batches of one epoch, in order; a sequence of arrays of indices.

    Why: sorting the whole epoch by length makes the same batches every epoch, and a
    run that leaves off at step K cannot know what came before it. Here only a random
    pool is sorted, and the answer depends on the arguments alone.
    """

    order: Indices
    """Every example once; those of a batch side by side."""
    starts: Indices
    """Where each batch begins in `order`, in the order of the epoch."""
    size: int
    """Examples in a batch; the last one of `order` may be smaller."""

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Indices]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Indices:
        start = self.starts[number]
        return self.order[start : start + self.size]


def epoch(
    lengths: np.ndarray, batch_size: int, *, seed: int, number: int, pool: int = POOL
) -> Epoch:
    """Return the batches of one epoch: alike in length within, random in order.

    Args:
        lengths: Tokens of each example, shape (N,).
        batch_size: Examples in a batch, >= 1.
        seed: Of the run, any integer.
        number: Of the epoch, counted from 0; each has its own order.
        pool: Batches that are sorted together, >= 1.
    """
    assert batch_size >= 1  # noqa: S101 - a negative size would make no batch at all
    draw = _stream(f"{seed} {number}")
    order = _shuffled(len(lengths), draw)
    span = pool * batch_size
    for start in range(0, len(order), span):
        pooled = order[start : start + span]
        # Stable, so that examples of one length stay in random order.
        pooled[:] = pooled[np.argsort(lengths[pooled], kind="stable")]
    starts = np.arange(0, len(order), batch_size, dtype=np.int64)
    return Epoch(order, starts[_shuffled(len(starts), draw)], batch_size)


def ordered(lengths: np.ndarray, batch_size: int) -> Epoch:
    """Return batches for evaluation, longest texts first.

    Why: memory then peaks in the first batch, where a failure costs nothing.
    """
    assert batch_size >= 1  # noqa: S101
    order = np.argsort(lengths, kind="stable")[::-1].astype(np.int64)
    starts = np.arange(0, len(order), batch_size, dtype=np.int64)
    return Epoch(order, starts, batch_size)


def share(batch: Indices, lengths: np.ndarray, rank: int, world: int) -> Indices:
    """Return one process's part of a batch, as heavy as the part of any other.

    Returns:
        The indices of this rank, shortest text first. The parts of all ranks make up
        the batch; with fewer examples than ranks some are empty.
    """
    assert 0 <= rank < world  # noqa: S101 - a slice takes any rank in silence
    return batch[np.argsort(lengths[batch], kind="stable")][rank::world]


def _stream(word: str) -> np.random.Philox:
    """Return random bits that are the same on every machine and version of numpy.

    Why: numpy promises that of bit generators, not of `permutation` or `shuffle`.
    """
    key = hashlib.sha256(word.encode()).digest()[:16]
    return np.random.Philox(key=np.frombuffer(key, dtype="<u8"))


def _shuffled(count: int, draw: np.random.Philox) -> Indices:
    """Return 0 to count - 1 in random order."""
    order: Indices = np.argsort(draw.random_raw(count), kind="stable")
    return order

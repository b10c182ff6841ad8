"""Batches of examples of similar length, in an order that a resumed run reproduces.

Why: a text padded to the longest of its batch costs as much as the longest. Among
texts of like length little is padding; and the order must still be random.
"""

from __future__ import annotations

import hashlib

import numpy as np

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

POOL = 50
"""Batches sorted together: enough for batches of one length, few beside an epoch."""


def epoch(
    lengths: np.ndarray, batch_size: int, *, seed: int, number: int, pool: int = POOL
) -> list[Indices]:
    """Return the batches of one epoch: alike in length within, random in order.

    Why: sorting the whole epoch by length makes the same batches every epoch, and a
    run that leaves off at step K cannot know what came before it. Here only a random
    pool is sorted, and the answer depends on the arguments alone.

    Args:
        lengths: Tokens of each example, shape (N,).
        batch_size: Examples in a batch, >= 1; the last one cut may be smaller.
        seed: Of the run, any integer.
        number: Of the epoch, counted from 0; each has its own order.
        pool: Batches that are sorted together, >= 1.
    """
    # numpy promises the bits of bit generators, not `permutation` or `shuffle`.
    key = hashlib.sha256(f"{seed} {number}".encode()).digest()[:16]
    draw = np.random.Philox(key=np.frombuffer(key, dtype="<u8"))
    order = _shuffled(len(lengths), draw)
    for pooled in _cut(order, pool * batch_size):
        # Stable, so that examples of one length stay in random order.
        pooled[:] = pooled[np.argsort(lengths[pooled], kind="stable")]
    batches = _cut(order, batch_size)
    return [batches[place] for place in _shuffled(len(batches), draw)]


def ordered(lengths: np.ndarray, batch_size: int) -> list[Indices]:
    """Return batches for evaluation, longest texts first.

    Why: memory then peaks in the first batch, where a failure costs nothing.
    """
    return _cut(np.argsort(lengths, kind="stable")[::-1].copy(), batch_size)


def share(batch: Indices, lengths: np.ndarray, rank: int, world: int) -> Indices:
    """Return one process's part of a batch, as heavy as the part of any other.

    Returns:
        The indices of this rank, shortest text first. The parts of all ranks make up
        the batch; with fewer examples than ranks some are empty.
    """
    return batch[np.argsort(lengths[batch], kind="stable")][rank::world]


def _cut(order: Indices, size: int) -> list[Indices]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _shuffled(count: int, draw: np.random.Philox) -> Indices:
    """Return 0 to count - 1 in random order."""
    order: Indices = np.argsort(draw.random_raw(count), kind="stable")
    return order

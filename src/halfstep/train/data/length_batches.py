"""Batches examples of similar length, in a reproducible random order.

Each text costs as much as the longest in its batch, so similar lengths save padding.
"""

from __future__ import annotations

import hashlib

import numpy as np

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

POOL = 50
"""Batches sorted together: enough for similar lengths, few compared with an epoch."""

RANDOM_STEPS = 200
"""Epochs that end within so many steps have random batches. Where the length of a text
says something about its label, batches of similar length hold few classes, and a model
that has learned nothing yet learns little from them."""


def epoch(
    lengths: np.ndarray, batch_size: int, *, seed: int, number: int
) -> list[Indices]:
    """Return the batches of one epoch: similar lengths within, random order overall.

    Sorting the whole epoch by length would make the same batches in every epoch; so
    only random pools are sorted, and none in epochs that end within `RANDOM_STEPS`. The
    result depends on the arguments alone, so that a resumed run continues in mid-epoch.
    """
    # numpy keeps the output of bit generators stable, not of `permutation`.
    key = hashlib.sha256(f"{seed} {number}".encode()).digest()[:16]
    draw = np.random.Philox(key=np.frombuffer(key, dtype="<u8"))
    order = _shuffled(len(lengths), draw)
    batches = _cut(order, batch_size)
    if (number + 1) * len(batches) > RANDOM_STEPS:
        for pooled in _cut(order, POOL * batch_size):
            # Stable, so that examples of one length stay in random order.
            pooled[:] = pooled[np.argsort(lengths[pooled], kind="stable")]
    return [batches[place] for place in _shuffled(len(batches), draw)]


def ordered(lengths: np.ndarray, batch_size: int) -> list[Indices]:
    """Return batches for evaluation, longest texts first.

    Memory then peaks in the first batch, so running out of it shows at once.
    """
    return _cut(np.argsort(lengths, kind="stable")[::-1].copy(), batch_size)


def token_batches(lengths: np.ndarray, tokens: int) -> list[Indices]:
    """Return batches of at most so many tokens with padding, longest texts first.

    A text that is longer is a batch of its own.
    """
    order = np.argsort(lengths, kind="stable")[::-1].copy()
    batches = []
    while len(order):
        size = max(1, tokens // max(1, int(lengths[order[0]])))
        batches.append(order[:size])
        order = order[size:]
    return batches


def share(batch: Indices, lengths: np.ndarray, rank: int, world: int) -> Indices:
    """Return one rank's part of a batch, about as costly as others; perhaps empty."""
    return batch[np.argsort(lengths[batch], kind="stable")][rank::world]


def _cut(order: Indices, size: int) -> list[Indices]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _shuffled(count: int, draw: np.random.Philox) -> Indices:
    order: Indices = np.argsort(draw.random_raw(count), kind="stable")
    return order

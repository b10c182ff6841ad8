"""Batches of texts of like length, and the tensors that a step reads.

In: token ids of every example, tokenised once. Out: lists of indices, and for each
list the padded tensors.

Why: a text padded to the longest of its batch costs as much as the longest. Among
texts of like length little is padding; and the order must still be random.

Shapes: B examples in a batch, T positions, N examples in all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH_MULTIPLE = 8
"""Tokens to whose multiple a batch is padded: what matrix units of half precision need
to run at full speed."""


def batches(
    lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int, pool: int = 50
) -> list[list[int]]:
    """Return the batches of one epoch: alike in length within, random in order.

    Why: sorting the whole epoch by length makes the same batches every epoch, and a
    run that leaves off at step K cannot know what came before it. Here only a random
    pool is sorted, and the answer depends on the arguments alone.

    Args:
        lengths: Tokens of each example.
        batch_size: Examples in a batch, >= 1. The last one drawn may be smaller.
        seed: Of the run, any integer.
        epoch: Counted from 0; each has its own order.
        pool: Batches that are sorted together, >= 1. Default 50: a guess, large enough
            for batches of one length, small beside an epoch.

    Returns:
        Lists of indices; each index stands in one of them, once.
    """
    # Text, not a tuple: it seeds through SHA-512, alike on every machine and version.
    draw = random.Random(f"{seed} {epoch}")  # noqa: S311 - an order is no secret
    order = list(range(len(lengths)))
    draw.shuffle(order)
    made = []
    for pooled in _cut(order, pool * batch_size):
        made += _cut(sorted(pooled, key=lengths.__getitem__), batch_size)
    draw.shuffle(made)
    return made


def ordered_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches for evaluation, longest texts first.

    Why: memory then peaks in the first batch, where a failure costs nothing.

    Args:
        lengths: Tokens of each example.
        batch_size: Examples in a batch, >= 1; the last may be smaller.

    Returns:
        Lists of indices; each index stands in one of them, once.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return _cut(order, batch_size)


def share(
    batch: Sequence[int], lengths: Sequence[int], rank: int, world: int
) -> list[int]:
    """Return one process's part of a batch, as heavy as the part of any other.

    Args:
        batch: Indices of the whole batch.
        lengths: Tokens of each example.
        rank: Which process, from 0 to `world` - 1.
        world: How many processes, >= 1.

    Returns:
        The indices of this rank, shortest text first. The parts of all ranks make up
        the batch; with fewer examples than ranks some are empty.
    """
    assert 0 <= rank < world  # noqa: S101 - a slice takes any rank in silence
    return sorted(batch, key=lengths.__getitem__)[rank::world]


def _cut(order: list[int], size: int) -> list[list[int]]:
    """Return the list in pieces of a size, the last one perhaps smaller."""
    assert size >= 1  # noqa: S101 - a negative size would make no batch at all
    return [order[start : start + size] for start in range(0, len(order), size)]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The token ids of all examples, stored flat.

    Why: a list of lists holds a Python object for every token, which a batch must
    visit one by one. One tensor is gathered at once, and takes 4 bytes a token.
    """

    ids: torch.Tensor
    """Token ids, one example after another. int32, shape (tokens in all,)."""
    starts: torch.Tensor
    """Where each example begins in `ids`, and the end. int64, shape (N + 1,)."""
    labels: torch.Tensor
    """The class of each example. int64, shape (N,)."""

    @classmethod
    def build(
        cls, token_lists: Sequence[Sequence[int]], labels: Sequence[int]
    ) -> Encoded:
        """Return flat storage of the token ids and the class of each example."""
        assert len(token_lists) == len(labels)  # noqa: S101 - else labels slip
        lengths = np.fromiter(map(len, token_lists), np.int64, len(token_lists))
        starts = np.concatenate([[0], lengths.cumsum()])
        ids = np.fromiter(chain.from_iterable(token_lists), np.int32, int(starts[-1]))
        return cls(
            ids=torch.from_numpy(ids),
            starts=torch.from_numpy(starts),
            labels=torch.tensor(labels, dtype=torch.int64),
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        return self.starts.diff().tolist()

    def collate(
        self, indices: Sequence[int], pad_id: int, multiple: int = WIDTH_MULTIPLE
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one batch, padded to its longest example.

        Args:
            indices: Which examples, in the order of the rows. None at all makes
                tensors of no rows.
            pad_id: The token that fills up a row.
            multiple: T is rounded up to a multiple of it, >= 1.

        Returns:
            `input_ids` and `attention_mask`, int64 of shape (B, T), and `labels`,
            int64 of shape (B,).
        """
        chosen = np.array(indices, dtype=np.int64)
        starts = self.starts.numpy()
        begins, ends = starts[chosen], starts[chosen + 1]
        longest = int((ends - begins).max(initial=1))
        width = -(-longest // multiple) * multiple
        places = begins[:, None] + np.arange(width)
        real = places < ends[:, None]
        input_ids = np.full(real.shape, pad_id, dtype=np.int64)
        input_ids[real] = self.ids.numpy()[places[real]]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
            "labels": self.labels[torch.from_numpy(chosen)],
        }

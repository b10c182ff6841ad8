"""The batch of each step, and this process's part of it, as tensors.

In: encoded examples and the order of batches. Out: `StepBatch`, one a step, made in
this process or ahead of time by others.

Why: a step is known by its number alone. So a resumed run begins in the middle of an
epoch without reading what came before, and any number of workers makes the same.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from halfstep.train.data.length_batches import epoch, share

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    from torch import Tensor

    from halfstep.distributed.process_group import World
    from halfstep.train.data.length_batches import Indices
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.tasks import Objective

_MASKING_SEED = 0x9E3779B9
"""Separates the seed of masking from that of dropout, in the 32 bits that count."""

_PREFETCH = 4
"""Steps that each worker prepares ahead: enough to bridge an evaluation's start."""


class StepBatch(NamedTuple):
    """What one process trains on in one step."""

    number: int
    """Of the step, counted from 1."""
    epoch: int
    """Counted from 0."""
    parts: list[dict[str, Tensor]]
    """Its micro-batches: `input_ids`, `attention_mask`, `labels`."""
    is_real: list[bool]
    """Whether each counts; one that does not stands in where texts ran out."""
    size: int
    """Texts of the whole batch, over all processes and micro-batches."""
    weight: float
    """Sum of the weights of the whole batch's targets."""
    tokens: int
    """Tokens of this process's part, without padding."""
    padded_tokens: int
    """The same with padding."""


@dataclass(frozen=True)
class TokenMasking:
    """Replaces random input tokens by the mask token, against memorizing."""

    share: float
    """Of the tokens, 0 <= share < 1."""
    mask_id: int
    special: Tensor
    """Ids of the tokens that are never masked."""

    def mask(self, ids: Tensor, draw: torch.Generator) -> Tensor:
        """Return the ids with a random share replaced by the mask."""
        chosen = torch.rand(ids.shape, generator=draw) < self.share
        return ids.masked_fill(chosen & ~torch.isin(ids, self.special), self.mask_id)


@dataclass(frozen=True)
class Order:
    """How the examples are cut into steps; the same on every process."""

    batch_size: int
    epochs: int
    accumulate: int
    seed: int


class StepDataset(Dataset[StepBatch]):
    """The work of each step, by its number."""

    def __init__(
        self,
        encoded: EncodedTexts,
        order: Order,
        objective: Objective,
        world: World,
        *,
        pad_id: int,
        multiple: int,
        masking: TokenMasking | None,
    ) -> None:
        self._encoded = encoded
        self._order = order
        self._objective = objective
        self._rank, self._size = world.rank, world.size
        self._pad_id = pad_id
        self._multiple = multiple
        self._masking = masking
        self._epoch: tuple[int, list[Indices]] | None = None
        self.per_epoch = -(-len(encoded) // order.batch_size)

    def __getitem__(self, number: int) -> StepBatch:
        """Return the work of a step, counted from 1."""
        at, place = divmod(number - 1, self.per_epoch)
        batch = self._batches(at)[place]
        mine = share(batch, self._encoded.lengths, self._rank, self._size)
        micro = self._order.accumulate
        pieces = [mine[start::micro] for start in range(micro)]
        is_real = [len(piece) > 0 for piece in pieces]
        # Without examples left, a process still takes part: the others wait for it.
        pieces = [piece if len(piece) else batch[:1] for piece in pieces]
        parts = [
            self._encoded.collate(piece, self._pad_id, self._multiple)
            for piece in pieces
        ]
        padded_tokens = sum(part["input_ids"].numel() for part in parts)
        if self._masking is not None:
            draw = torch.Generator().manual_seed(self.seed_of(number) ^ _MASKING_SEED)
            for part in parts:
                part["input_ids"] = self._masking.mask(part["input_ids"], draw)
        return StepBatch(
            number,
            at,
            parts,
            is_real,
            len(batch),
            self._objective.weight(self._encoded, batch),
            int(self._encoded.lengths[mine].sum()),
            padded_tokens,
        )

    def seed_of(self, number: int) -> int:
        """Return the seed of all that a step draws on this process."""
        total = self.per_epoch * self._order.epochs
        return (self._order.seed * total + number) * self._size + self._rank

    def _batches(self, number: int) -> list[Indices]:
        """Return the batches of an epoch; those of the last one asked for are kept."""
        if self._epoch is None or self._epoch[0] != number:
            order = self._order
            lengths = self._encoded.lengths
            batches = epoch(lengths, order.batch_size, seed=order.seed, number=number)
            self._epoch = number, batches
        return self._epoch[1]


def iterate_steps(
    steps: StepDataset, first: int, last: int, *, workers: int, pin: bool
) -> Generator[StepBatch]:
    """Yield the work of each step from `first` to `last`, both counted from 1.

    `workers` processes prepare it ahead; `pin` keeps it in memory that a GPU reads by
    itself. Closing ends the workers, which must be done: they outlive an error else.
    """
    more: dict[str, Any] = {"prefetch_factor": _PREFETCH} if workers else {}
    numbers: Any = range(first, last + 1)  # an iterable will do, says torch's manual
    yield from DataLoader(
        steps,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=_ignore_signals,
        **more,
    )


def _ignore_signals(worker: int) -> None:
    """Leave signals to the process that trains, which ends its workers itself.

    Schedulers and terminals signal all processes of a group, and a worker that dies
    takes the step under way with it.
    """
    del worker
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def padding_fraction(lengths: np.ndarray, order: Order) -> float:
    """Return the share of a first epoch's places that hold padding."""
    batches = epoch(lengths, order.batch_size, seed=order.seed, number=0)
    padded_tokens = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    return 1 - float(lengths.sum()) / max(1, padded_tokens)

"""Builds this rank's micro-batches of each optimizer step.

A step depends on its number alone, so a resumed run can start in the middle of an epoch
without iterating over what came before, and the number of workers changes nothing.
"""

from __future__ import annotations

import signal
from dataclasses import KW_ONLY, dataclass, field
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
    from halfstep.train.objective import Objective

_MASKING_SEED = 0x9E3779B9
"""XORed into the step's seed, so that masking and dropout draw different numbers."""

_PREFETCH = 4
"""Steps that each worker prefetches: enough to cover the start of an evaluation."""


class StepBatch(NamedTuple):
    """The examples of one process in one optimizer step, and its tokens."""

    number: int
    """Number of the step, counted from 1."""
    epoch: int
    parts: list[dict[str, Tensor]]
    """Its micro-batches: `input_ids`, `attention_mask`, `labels`."""
    is_real: list[bool]
    """Whether a micro-batch counts; False for the filler of a rank without texts."""
    size: int
    """Texts in the batch, over all ranks and micro-batches."""
    weight: float
    """Sum of the target weights, over all ranks and micro-batches."""
    tokens: int
    padded_tokens: int


@dataclass(frozen=True)
class TokenMasking:
    """Replaces random input tokens by the mask token, against overfitting."""

    share: float
    mask_id: int
    special: Tensor
    """Ids of tokens that are never masked."""

    def mask(self, ids: Tensor, draw: torch.Generator) -> Tensor:
        """Return token ids with a random share replaced by `mask_id`."""
        chosen = torch.rand(ids.shape, generator=draw) < self.share
        return ids.masked_fill(chosen & ~torch.isin(ids, self.special), self.mask_id)


@dataclass(frozen=True)
class Order:
    """How the examples are split into steps; the same on every rank."""

    batch_size: int
    epochs: int
    accumulate: int
    seed: int


@dataclass(eq=False)
class StepDataset(Dataset[StepBatch]):
    """The StepBatch of each step, by its number."""

    encoded: EncodedTexts
    order: Order
    objective: Objective
    world: World
    _: KW_ONLY
    pad_id: int
    multiple: int
    """Batches are padded to a multiple of this many tokens."""
    masking: TokenMasking | None
    _epoch: tuple[int, list[Indices]] | None = field(default=None, init=False)

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-len(self.encoded) // self.order.batch_size)

    def __getitem__(self, number: int) -> StepBatch:
        """Return the batch of a step, counted from 1."""
        at, place = divmod(number - 1, self.per_epoch)
        batch = self._batches(at)[place]
        mine = share(batch, self.encoded.lengths, self.world.rank, self.world.size)
        micro = self.order.accumulate
        pieces = [mine[start::micro] for start in range(micro)]
        is_real = [len(piece) > 0 for piece in pieces]
        # A rank without examples still runs: the others wait for its collectives.
        pieces = [piece if len(piece) else batch[:1] for piece in pieces]
        parts = [
            self.encoded.collate(piece, self.pad_id, self.multiple) for piece in pieces
        ]
        padded_tokens = sum(part["input_ids"].numel() for part in parts)
        if self.masking is not None:
            draw = torch.Generator().manual_seed(self.seed_of(number) ^ _MASKING_SEED)
            for part in parts:
                part["input_ids"] = self.masking.mask(part["input_ids"], draw)
        return StepBatch(
            number,
            at,
            parts,
            is_real,
            len(batch),
            self.objective.weight(self.encoded, batch),
            int(self.encoded.lengths[mine].sum()),
            padded_tokens,
        )

    def seed_of(self, number: int) -> int:
        """Return the seed of a step's random numbers on this rank."""
        total = self.per_epoch * self.order.epochs
        return (self.order.seed * total + number) * self.world.size + self.world.rank

    def _batches(self, number: int) -> list[Indices]:
        """Return the batches of an epoch; the last epoch's are cached."""
        if self._epoch is None or self._epoch[0] != number:
            order = self.order
            lengths = self.encoded.lengths
            batches = epoch(lengths, order.batch_size, seed=order.seed, number=number)
            self._epoch = number, batches
        return self._epoch[1]


def iterate_steps(
    steps: StepDataset, first: int, last: int, *, workers: int, pin: bool
) -> Generator[StepBatch]:
    """Yield the StepBatch of each step from `first` to `last`, both counted from 1.

    `workers` processes prefetch, `pin` copies to pinned memory. Close the generator:
    after an error in the loop, its workers would go on running.
    """
    more: dict[str, Any] = {"prefetch_factor": _PREFETCH} if workers else {}
    numbers: Any = range(first, last + 1)  # torch documents any iterable
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
    """Ignore signals in a worker: they reach the whole group, and the main process."""
    del worker
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def padding_fraction(lengths: np.ndarray, order: Order) -> float:
    """Return the padding fraction of the last epoch."""
    last = order.epochs - 1
    batches = epoch(lengths, order.batch_size, seed=order.seed, number=last)
    padded_tokens = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    return 1 - float(lengths.sum()) / max(1, padded_tokens)

"""Chunks of many parameters, that stay in cache while torch works on them.

In: items. Out: pieces of them, brought together as fp32 in memory that is used again
and again, and put back in their form. Small tensors share a chunk, and so cost a few
operations together, not dozens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.masters import chunk_codec, stochastic_codec
from halfstep.masters.chunk_codec import scratch
from halfstep.masters.encoding import EXTRA, LOW_STATES
from halfstep.masters.update_rules import Sgd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from halfstep.masters.update_rules import Adam, Item

CHUNK = 1 << 16
"""Numbers at a time on a CPU: 256 KiB of fp32 for each thing that a number has."""

CHUNK_ELSEWHERE = 1 << 22
"""On a device, where an operation takes as long to start as on millions of numbers."""

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a tensor."""

    index: int
    """Which in a list."""
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this stretch."""
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        if self.size == flat.numel():
            return flat
        return flat[self.start : self.start + self.size]


def cut(tensors: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Cut large tensors into chunks, and gather small ones into chunks."""
    if not tensors:
        return
    most = CHUNK if tensors[0].is_cpu else CHUNK_ELSEWHERE
    held: list[Piece] = []
    total = 0
    for index, tensor in enumerate(tensors):
        numel = tensor.numel()
        if numel > most // 2:
            for start in range(0, numel, most):
                yield [Piece(index, start, min(most, numel - start))]
            continue
        if total + numel > most:
            yield held
            held, total = [], 0
        if numel:
            held.append(Piece(index, 0, numel))
            total += numel
    if held:
        yield held


@dataclass(slots=True)
class Numbers:
    """What a rule works on: fp32, of one length."""

    truth: Tensor
    gradient: Tensor
    states: list[Tensor]
    spare: Tensor


class Chunk:
    """Pieces of some items, brought together in fp32 and taken apart again.

    A single piece that is fp32 already is worked on where it lies.
    """

    def __init__(self, items: Sequence[Item], pieces: list[Piece], form: str) -> None:
        self.form = form
        self.pieces = pieces
        self.items = [items[piece.index] for piece in pieces]
        self.sizes = [piece.size for piece in pieces]
        self.numel = sum(self.sizes)
        self.device = self.items[0].weight.device
        self.weights = self._pieces([item.weight for item in self.items])
        self.extras: list[Tensor] = []
        if form in EXTRA:
            extras = [item.extra for item in self.items if item.extra is not None]
            self.extras = self._pieces(extras)
        self.states: list[list[Tensor]] = []

    def read(self, rule: Sgd | Adam, factor: Tensor) -> Numbers:
        """Return everything as fp32, the gradient multiplied by `factor`."""
        gradients = self._pieces([item.gradient for item in self.items])
        count = min(len(item.states) for item in self.items)
        if isinstance(rule, Sgd) and not rule.momentum:
            count = 0
        self.states = [
            self._pieces([item.states[number] for item in self.items])
            for number in range(count)
        ]
        gradient = self._copied("gradient", gradients, torch.float32)
        self.numbers = Numbers(
            self._truth(),
            torch.mul(gradient, factor, out=gradient),
            [
                self._gathered(f"state {number}", state, torch.float32)
                for number, state in enumerate(self.states)
            ],
            self._room("spare", torch.float32),
        )
        return self.numbers

    def write(self, clock: tuple[int, int]) -> None:
        """Put back what was updated."""
        if self.form not in LOW_STATES:
            for kept, state in zip(self.numbers.states, self.states, strict=True):
                self._back(kept, state)
            self._publish(None)
            return
        # Drawn once for two things: each number gives 32 bits.
        draws = Draws(self, clock)
        self._publish(draws)
        low = self._room("state", torch.bfloat16)
        for number, state in enumerate(self.states):
            chunk_codec.round_(self.numbers.states[number], low, draws(number + 1))
            self._back(low, state)

    def _truth(self) -> Tensor:
        if self.form == "plain":
            return self._gathered("truth", self.weights, torch.float32)
        if self.form == "fp32":
            return self._gathered("truth", self.extras, torch.float32)
        if self.form == "stochastic":
            return self._copied("truth", self.weights, torch.float32)
        weight = self._gathered("weight", self.weights, torch.bfloat16)
        extra = self._gathered("extra", self.extras, EXTRA[self.form])
        truth = self._room("truth", torch.float32)
        chunk_codec.decode_(weight, extra, truth)
        return truth

    def _publish(self, draws: Draws | None) -> None:
        truth = self.numbers.truth
        if self.form == "fp32":
            self._back(truth, self.extras)
        if self.form in {"plain", "fp32"}:
            self._back(truth, self.weights)
            return
        weight = self._place("weight", self.weights, torch.bfloat16)
        if draws is not None and self.form == "stochastic":
            chunk_codec.round_(truth, weight, draws(0))
        else:
            extra = self._place("extra", self.extras, EXTRA[self.form])
            chunk_codec.encode_(truth, weight, extra)
            self._back(extra, self.extras)
        self._back(weight, self.weights)

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.pieces, tensors, strict=True)
        return [piece.of(tensor) for piece, tensor in pairs]

    def _room(self, name: str, dtype: torch.dtype) -> Tensor:
        return scratch(name, self.numel, dtype, self.device)

    def _place(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return where the chunk of some tensors is: in place, or in scratch memory."""
        if len(pieces) == 1 and pieces[0].dtype == dtype:
            return pieces[0]
        return self._room(name, dtype)

    def _copied(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        room = self._room(name, dtype)
        torch._foreach_copy_(room.split_with_sizes(self.sizes), pieces)
        return room

    def _gathered(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        place = self._place(name, pieces, dtype)
        return place if place is pieces[0] else self._copied(name, pieces, dtype)

    def _back(self, chunk: Tensor, pieces: list[Tensor]) -> None:
        if chunk is not pieces[0]:
            torch._foreach_copy_(pieces, chunk.split_with_sizes(self.sizes))


class Draws:
    """Random bits for a chunk: those of `stochastic_codec.random16` for each piece.

    Why: asking for each piece by itself costs a dozen operations a parameter.
    """

    def __init__(self, chunk: Chunk, clock: tuple[int, int]) -> None:
        self.chunk = chunk
        self.clock = clock
        self.drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int) -> Tensor:
        """Return 16 bits for each number of the weight (0) or a state (1 and on)."""
        stream, low = divmod(number, 2)
        if stream not in self.drawn:
            self.drawn[stream] = self._stream(stream)
        return self.drawn[stream][low]

    def _stream(self, stream: int) -> tuple[Tensor, Tensor]:
        chunk = self.chunk
        keys = [stochastic_codec.key(*self.clock, i.index, stream) for i in chunk.items]
        if len(keys) == 1:
            piece = chunk.pieces[0]
            return stochastic_codec.random16(
                keys[0], piece.size, chunk.device, start=piece.start
            )
        begun = 0
        firsts = []
        for (first, _), piece in zip(keys, chunk.pieces, strict=True):
            # Element `start` of the piece is number `begun` of the chunk.
            firsts.append(first + piece.start - begun)
            begun += piece.size
        sizes = torch.tensor(chunk.sizes, device=chunk.device)
        words = torch.tensor([firsts, [second for _, second in keys]])
        spread = words.to(chunk.device).repeat_interleave(
            sizes, 1, output_size=chunk.numel
        )
        count = torch.arange(chunk.numel, device=chunk.device)
        mixed = stochastic_codec.mix(count.add_(spread[0]).bitwise_and_(_WORD))
        mixed = stochastic_codec.mix(mixed.bitwise_xor_(spread[1]))
        return (mixed >> 16).to(torch.int32), (mixed & _WORD >> 16).to(torch.int32)

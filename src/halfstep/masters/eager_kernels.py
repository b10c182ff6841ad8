"""Updates of parameters with torch's own operations, on chunks that stay in cache.

In: items on one device, a rule and a form. Out: state, fp32 value and weight, updated
in place. It runs wherever torch does, and rounds as the compiled kernels do, but for
torch's square root, which may miss the nearest fp32 by one. Small tensors are gathered
into one chunk, and cost a few operations together, not dozens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.masters import bf16_codecs
from halfstep.masters.bf16_codecs import scratch
from halfstep.masters.encoding import BF16_STATE_ENCODINGS, ENCODINGS, RESIDUAL_DTYPES
from halfstep.masters.update_rules import Sgd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from halfstep.masters.update_rules import Adam, ParamUpdate

ROW = 4096
"""Numbers in one partial sum. Threads share rows out, and never one row."""

CHUNK = 1 << 16
"""Numbers at a time on a CPU: 256 KiB of fp32 for each thing that a number has."""

DEVICE_CHUNK = 1 << 22
"""On a device, where an operation takes as long to start as on millions of numbers."""

_WORD = 0xFFFFFFFF


def available() -> bool:
    """Say that torch's operations are always there."""
    return True


def describe() -> str:
    """Say in one line what this is, for people."""
    return "torch's own operations, on chunks that stay in cache"


@torch.no_grad()
def update(
    items: Sequence[ParamUpdate],
    rule: Sgd | Adam,
    encoding: str,
    *,
    inverse: Tensor,
    clock: tuple[int, int],
) -> None:
    """Update parameters in place: state, fp32 value and weight.

    Args:
        items: On one device.
        rule: With which numbers.
        encoding: Of the fp32 value: "plain", "fp32", "split", "kahan", "stochastic".
        inverse: Of the loss scale, fp32, shape (). Gradients are multiplied by it.
        clock: Seed and step of the random numbers.
    """
    factor = -inverse if rule.maximize else inverse
    for (first, step), group in _group_updates(items, rule).items():
        for pieces in cut_chunks([item.weight for item in group]):
            chunk = Chunk(group, pieces, encoding)
            _apply(rule, chunk.read(rule, factor), first=first, step=step)
            chunk.write(clock)


@torch.no_grad()
def check_finite(
    gradients: Sequence[Tensor], *, norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Read gradients once, and change nothing.

    Args:
        gradients: On one device: bf16, fp16, fp32.
        norm: Whether the sum of squares is wanted.

    Returns:
        1.0 if a number is inf or NaN, else 0.0: fp32, shape (); and the sum of squares:
        fp64, shape (), always added in one order, whatever the number of threads.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for pieces in cut_chunks(gradients):
        total += _squares([piece.of(gradients[piece.index]) for piece in pieces])
    # No square of an fp32 number, and no sum of such, is too large for fp64.
    return (~torch.isfinite(total)).float(), total if norm else None


def _group_updates(
    items: Sequence[ParamUpdate], rule: Sgd | Adam
) -> dict[tuple[bool, float], list[ParamUpdate]]:
    """Return items by what an operation on many of them must have in common."""
    if isinstance(rule, Sgd):
        keys = [(item.is_first_step and rule.momentum != 0, 0.0) for item in items]
    else:
        steps = [item.step for item in items if item.step is not None]
        # One wait for the device, not one for each parameter.
        counts = torch.stack(steps).tolist() if steps else []
        keys = [(False, count) for count in counts]
    groups: dict[tuple[bool, float], list[ParamUpdate]] = {}
    for key, item in zip(keys, items, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def _apply(rule: Sgd | Adam, values: ChunkValues, *, first: bool, step: float) -> None:
    """Do what torch.optim does, each operation rounded by itself.

    Why: torch multiplies and adds in one rounding where its vectors are full, and in
    two at the ends of a thread's share; `add(alpha=...)` depends on how many there are.
    """
    w, g, spare = values.fp32, values.gradient, values.scratch
    if isinstance(rule, Sgd):
        _sgd(rule, values, first=first)
        return
    a, b = values.states[:2]
    if rule.decoupled:
        w.mul_(1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        g.add_(torch.mul(w, rule.weight_decay, out=spare))
    torch.sub(g, a, out=spare)
    near = 1 - rule.beta1
    # torch.lerp goes from the nearer end.
    if near < 0.5:  # noqa: PLR2004
        a.add_(spare.mul_(near))
    else:
        torch.sub(g, spare.mul_(1 - near), out=a)
    b.mul_(rule.beta2).add_(torch.mul(g, 1 - rule.beta2, out=spare).mul_(g))
    square = b
    if rule.amsgrad:
        square = torch.maximum(values.states[2], b, out=values.states[2])
    torch.sqrt(square, out=spare)
    spare.div_((1 - rule.beta2**step) ** 0.5).add_(rule.eps)
    torch.div(a, spare, out=spare)
    w.sub_(spare.mul_(rule.lr / (1 - rule.beta1**step)))


def _sgd(rule: Sgd, values: ChunkValues, *, first: bool) -> None:
    w, g, spare = values.fp32, values.gradient, values.scratch
    if rule.weight_decay:
        g.add_(torch.mul(w, rule.weight_decay, out=spare))
    if rule.momentum:
        buffer = values.states[0]
        if first:
            buffer.copy_(g)
        else:
            buffer.mul_(rule.momentum)
            buffer.add_(torch.mul(g, 1 - rule.dampening, out=spare))
        if rule.nesterov:
            g.add_(torch.mul(buffer, rule.momentum, out=spare))
        else:
            g = buffer
    w.sub_(torch.mul(g, rule.lr, out=spare))


def _squares(pieces: list[Tensor]) -> Tensor:
    """Return the sum of squares of some stretches, fp64, shape ()."""
    sizes = [piece.numel() for piece in pieces]
    rows = -(-sum(sizes) // ROW)
    room = scratch("squares", rows * ROW, torch.float64, pieces[0].device)
    used = room[: sum(sizes)]
    torch._foreach_copy_(used.split_with_sizes(sizes), pieces)
    room[used.numel() :].zero_()
    return room.mul_(room).view(rows, ROW).sum(1).sum()


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


def cut_chunks(tensors: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Cut large tensors into chunks, and gather small ones into chunks."""
    if not tensors:
        return
    limit = CHUNK if tensors[0].is_cpu else DEVICE_CHUNK
    pieces: list[Piece] = []
    total = 0
    for index, tensor in enumerate(tensors):
        numel = tensor.numel()
        if numel > limit // 2:
            for start in range(0, numel, limit):
                yield [Piece(index, start, min(limit, numel - start))]
            continue
        if total + numel > limit:
            yield pieces
            pieces, total = [], 0
        if numel:
            pieces.append(Piece(index, 0, numel))
            total += numel
    if pieces:
        yield pieces


@dataclass(slots=True)
class ChunkValues:
    """What a rule works on: fp32, of one length."""

    fp32: Tensor
    gradient: Tensor
    states: list[Tensor]
    scratch: Tensor


class Chunk:
    """Pieces of some items, brought together in fp32 and taken apart again.

    A single piece that is fp32 already is worked on where it lies.
    """

    def __init__(
        self, items: Sequence[ParamUpdate], pieces: list[Piece], encoding: str
    ) -> None:
        self.encoding = encoding
        self.pieces = pieces
        self.items = [items[piece.index] for piece in pieces]
        self.sizes = [piece.size for piece in pieces]
        self.numel = sum(self.sizes)
        self.device = self.items[0].weight.device
        self.weights = self._pieces([item.weight for item in self.items])
        self.residuals: list[Tensor] = []
        if encoding in RESIDUAL_DTYPES:
            residuals = [
                item.residual for item in self.items if item.residual is not None
            ]
            self.residuals = self._pieces(residuals)
        self.states: list[list[Tensor]] = []

    def read(self, rule: Sgd | Adam, factor: Tensor) -> ChunkValues:
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
        self.values = ChunkValues(
            self._read_fp32(),
            torch.mul(gradient, factor, out=gradient),
            [
                self._gathered(f"state {number}", state, torch.float32)
                for number, state in enumerate(self.states)
            ],
            self._scratch("spare", torch.float32),
        )
        return self.values

    def write(self, clock: tuple[int, int]) -> None:
        """Put back what was updated."""
        if self.encoding not in BF16_STATE_ENCODINGS:
            for new_state, state in zip(self.values.states, self.states, strict=True):
                self._copy_back(new_state, state)
            self._write_fp32(None)
            return
        # Drawn once for two things: each number gives 32 bits.
        draws = RandomBits(self, clock)
        self._write_fp32(draws)
        low = self._scratch("state", torch.bfloat16)
        for number, state in enumerate(self.states):
            bf16_codecs.stochastic_round_(
                self.values.states[number], low, draws(number + 1)
            )
            self._copy_back(low, state)

    def _read_fp32(self) -> Tensor:
        if self.encoding == "plain":
            return self._gathered("fp32", self.weights, torch.float32)
        if self.encoding == "fp32":
            return self._gathered("fp32", self.residuals, torch.float32)
        if self.encoding == "stochastic":
            return self._copied("fp32", self.weights, torch.float32)
        weight = self._gathered("weight", self.weights, torch.bfloat16)
        residual = self._gathered(
            "extra", self.residuals, RESIDUAL_DTYPES[self.encoding]
        )
        fp32 = self._scratch("fp32", torch.float32)
        ENCODINGS[self.encoding].decode_(weight, residual, fp32)
        return fp32

    def _write_fp32(self, draws: RandomBits | None) -> None:
        fp32 = self.values.fp32
        if self.encoding == "fp32":
            self._copy_back(fp32, self.residuals)
        if self.encoding in {"plain", "fp32"}:
            self._copy_back(fp32, self.weights)
            return
        weight = self._chunk_memory("weight", self.weights, torch.bfloat16)
        if draws is not None and self.encoding == "stochastic":
            bf16_codecs.stochastic_round_(fp32, weight, draws(0))
        else:
            residual = self._chunk_memory(
                "extra", self.residuals, RESIDUAL_DTYPES[self.encoding]
            )
            ENCODINGS[self.encoding].encode_(fp32, weight, residual, None)
            self._copy_back(residual, self.residuals)
        self._copy_back(weight, self.weights)

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.pieces, tensors, strict=True)
        return [piece.of(tensor) for piece, tensor in pairs]

    def _scratch(self, name: str, dtype: torch.dtype) -> Tensor:
        return scratch(name, self.numel, dtype, self.device)

    def _chunk_memory(
        self, name: str, pieces: list[Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return where the chunk of some tensors is: in place, or in scratch memory."""
        if len(pieces) == 1 and pieces[0].dtype == dtype:
            return pieces[0]
        return self._scratch(name, dtype)

    def _copied(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        room = self._scratch(name, dtype)
        torch._foreach_copy_(room.split_with_sizes(self.sizes), pieces)
        return room

    def _gathered(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        place = self._chunk_memory(name, pieces, dtype)
        return place if place is pieces[0] else self._copied(name, pieces, dtype)

    def _copy_back(self, chunk: Tensor, pieces: list[Tensor]) -> None:
        if chunk is not pieces[0]:
            torch._foreach_copy_(pieces, chunk.split_with_sizes(self.sizes))


class RandomBits:
    """Random bits for a chunk: `random_bits16` for each piece.

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
        keys = [
            bf16_codecs.key(*self.clock, i.param_index, stream) for i in chunk.items
        ]
        if len(keys) == 1:
            piece = chunk.pieces[0]
            return bf16_codecs.random_bits16(
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
        mixed = bf16_codecs.mix(count.add_(spread[0]).bitwise_and_(_WORD))
        mixed = bf16_codecs.mix(mixed.bitwise_xor_(spread[1]))
        return (mixed >> 16).to(torch.int32), (mixed & _WORD >> 16).to(torch.int32)

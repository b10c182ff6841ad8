"""Optimizer updates with torch ops, on chunks that fit into the CPU cache.

Rounds like the compiled kernels, except for torch's square root, which may be off by
one ulp. Small tensors share one chunk, so that they cost a few ops together instead of
dozens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch

from halfstep.masters import bf16_codecs
from halfstep.masters.bf16_codecs import scratch
from halfstep.masters.encoding import BF16_STATE_ENCODINGS, ENCODINGS, RESIDUAL_DTYPES
from halfstep.masters.fused_step import Sgd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from halfstep.masters.fused_step import ParamUpdate, Rule

ROW = 4096
"""Elements per partial sum of squares; threads never share one."""

CHUNK = 1 << 16
"""Elements per chunk: 256 KiB for each fp32 buffer."""


def describe() -> str:
    """Return a one-line description."""
    return "torch's own operations, on chunks that stay in cache"


@torch.no_grad()
def update(
    items: Sequence[ParamUpdate],
    rule: Rule,
    encoding: str,
    *,
    inverse: Tensor,
    clock: tuple[int, int],
    counters: list[Tensor] | tuple[()] = (),
) -> None:
    """Update parameters of one device in place: see `fused_step.Kernel`."""
    if counters:
        torch._foreach_add_(counters, 1.0)
    factor = -inverse if rule.maximize else inverse
    for (first, step), group in groupby(items, _step_of):
        same_step = [*group]
        for pieces in cut_chunks([item.weight for item in same_step]):
            chunk = Chunk(same_step, pieces, rule, encoding)
            chunk.gradient.mul_(factor)
            _apply(rule, chunk, first=first, step=step)
            chunk.write(clock)


@torch.no_grad()
def check_finite(
    gradients: Sequence[Tensor], *, norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Check gradients of one device: see `fused_step.Kernel`."""
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for pieces in cut_chunks(gradients):
        sizes = [piece.size for piece in pieces]
        rows = -(-sum(sizes) // ROW)
        buffer = scratch("squares", rows * ROW, torch.float64, device)
        used, unused = buffer.tensor_split([sum(sizes)])
        values = [piece.of(gradients[piece.index]) for piece in pieces]
        torch._foreach_copy_(used.split_with_sizes(sizes), values)
        unused.zero_()
        total += buffer.mul_(buffer).view(rows, ROW).sum(1).sum()
    # Sums of squares of fp32 values cannot overflow fp64.
    return (~torch.isfinite(total)).float(), total if norm else None


def _step_of(item: ParamUpdate) -> tuple[bool, float]:
    """Return what items that one op can update together have in common."""
    return item.is_first_step, 0.0 if item.step is None else float(item.step)


def _apply(rule: Rule, chunk: Chunk, *, first: bool, step: float) -> None:
    """Apply torch.optim's arithmetic with every operation rounded separately.

    Why: `add(alpha=...)` uses fused multiply-add for full vectors but two roundings at
    the ends of a thread's range, so its results depend on the number of threads.
    """
    if isinstance(rule, Sgd):
        _sgd(rule, chunk, first=first)
        return
    w, g, spare = chunk.fp32, chunk.gradient, chunk.spare
    a, b = chunk.states[:2]
    if rule.decoupled:
        w.mul_(1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        g.add_(torch.mul(w, rule.weight_decay, out=spare))
    torch.sub(g, a, out=spare)
    near = 1 - rule.beta1
    # torch.lerp starts from the nearer end point.
    if near < 0.5:  # noqa: PLR2004
        a.add_(spare.mul_(near))
    else:
        torch.sub(g, spare.mul_(1 - near), out=a)
    b.mul_(rule.beta2).add_(torch.mul(g, 1 - rule.beta2, out=spare).mul_(g))
    square = b
    if rule.amsgrad:
        square = torch.maximum(chunk.states[2], b, out=chunk.states[2])
    torch.sqrt(square, out=spare)
    spare.div_((1 - rule.beta2**step) ** 0.5).add_(rule.eps)
    torch.div(a, spare, out=spare)
    w.sub_(spare.mul_(rule.lr / (1 - rule.beta1**step)))


def _sgd(rule: Sgd, chunk: Chunk, *, first: bool) -> None:
    w, g, spare = chunk.fp32, chunk.gradient, chunk.spare
    if rule.weight_decay:
        g.add_(torch.mul(w, rule.weight_decay, out=spare))
    if rule.momentum:
        buffer = chunk.states[0]
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


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of a flattened tensor."""

    index: int
    """Index of the tensor in its list."""
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this range of `tensor`."""
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        if self.size == flat.numel():
            return flat
        return flat[self.start : self.start + self.size]


def cut_chunks(tensors: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Yield chunks: ranges of one large tensor, or several whole small tensors."""
    pieces: list[Piece] = []
    total = 0
    for index, tensor in enumerate(tensors):
        numel = tensor.numel()
        if numel > CHUNK // 2:
            for start in range(0, numel, CHUNK):
                yield [Piece(index, start, min(CHUNK, numel - start))]
            continue
        if total + numel > CHUNK:
            yield pieces
            pieces, total = [], 0
        if numel:
            pieces.append(Piece(index, 0, numel))
            total += numel
    if pieces:
        yield pieces


class Chunk:
    """Some pieces of the items, gathered in fp32; `write` stores the updated values.

    A chunk of one fp32 piece is updated in place.
    """

    def __init__(
        self,
        items: Sequence[ParamUpdate],
        pieces: list[Piece],
        rule: Rule,
        encoding: str,
    ) -> None:
        self._encoding = encoding
        self._start = pieces[0].start
        self._sizes = [piece.size for piece in pieces]
        self._items = items = [items[piece.index] for piece in pieces]

        def cut(tensors: list[Any]) -> list[Tensor]:
            return [p.of(t) for p, t in zip(pieces, tensors, strict=True)]

        self._weights = cut([item.weight for item in items])
        self._residuals: list[Tensor] = []
        if encoding in RESIDUAL_DTYPES:
            self._residuals = cut([item.residual for item in items])
        count = len(rule.state_keys)
        self._states = [cut([i.states[n] for i in items]) for n in range(count)]
        gradients = cut([item.gradient for item in items])
        self.gradient = self._copied("gradient", gradients, torch.float32)
        self.fp32 = self._read_fp32()
        named = enumerate(self._states)
        self.states = [self._gathered(f"state {n}", s, torch.float32) for n, s in named]
        self.spare = self._scratch("spare", torch.float32)

    def write(self, clock: tuple[int, int]) -> None:
        """Store the updated values."""
        if self._encoding not in BF16_STATE_ENCODINGS:
            for new_state, state in zip(self.states, self._states, strict=True):
                self._copy_back(new_state, state)
            self._write_fp32(None)
            return
        bits: list[Tensor] = []
        if self._encoding == "stochastic" or self.states:
            # Each stream is 2 x 16 bits: for weight and state, or for two states.
            for stream in range(len(self.states) // 2 + 1):
                bits += self._random_bits(clock, stream)
        self._write_fp32(bits[0] if self._encoding == "stochastic" else None)
        low = self._scratch("state", torch.bfloat16)
        for new_state, state, drawn in zip(  # noqa: B905 -- a draw may be left over
            self.states, self._states, bits[1:]
        ):
            bf16_codecs.stochastic_round_(new_state, low, drawn)
            self._copy_back(low, state)

    def _read_fp32(self) -> Tensor:
        if self._encoding == "plain":
            return self._gathered("fp32", self._weights, torch.float32)
        if self._encoding == "fp32":
            return self._gathered("fp32", self._residuals, torch.float32)
        if self._encoding == "stochastic":
            return self._copied("fp32", self._weights, torch.float32)
        weight = self._gathered("weight", self._weights, torch.bfloat16)
        dtype = RESIDUAL_DTYPES[self._encoding]
        residual = self._gathered("residual", self._residuals, dtype)
        fp32 = self._scratch("fp32", torch.float32)
        ENCODINGS[self._encoding].decode_(weight, residual, fp32)
        return fp32

    def _write_fp32(self, random_bits: Tensor | None) -> None:
        if self._encoding == "fp32":
            self._copy_back(self.fp32, self._residuals)
        if self._encoding in {"plain", "fp32"}:
            self._copy_back(self.fp32, self._weights)
            return
        weight = self._memory("weight", self._weights, torch.bfloat16)
        residual = None
        if self._residuals:
            dtype = RESIDUAL_DTYPES[self._encoding]
            residual = self._memory("residual", self._residuals, dtype)
        encoding = ENCODINGS[self._encoding]
        encoding.encode_(self.fp32, weight, residual, random_bits)
        if residual is not None:
            self._copy_back(residual, self._residuals)
        self._copy_back(weight, self._weights)

    def _scratch(self, name: str, dtype: torch.dtype) -> Tensor:
        return scratch(name, sum(self._sizes), dtype, self._weights[0].device)

    def _memory(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the tensor itself if it is the whole chunk, else scratch memory."""
        if len(pieces) == 1 and pieces[0].dtype == dtype:
            return pieces[0]
        return self._scratch(name, dtype)

    def _copied(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        buffer = self._scratch(name, dtype)
        torch._foreach_copy_(buffer.split_with_sizes(self._sizes), pieces)
        return buffer

    def _gathered(self, name: str, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        memory = self._memory(name, pieces, dtype)
        return memory if memory is pieces[0] else self._copied(name, pieces, dtype)

    def _copy_back(self, chunk: Tensor, pieces: list[Tensor]) -> None:
        if chunk is not pieces[0]:
            torch._foreach_copy_(pieces, chunk.split_with_sizes(self._sizes))

    def _random_bits(self, clock: tuple[int, int], stream: int) -> tuple[Tensor, ...]:
        """Return the two tensors of `random_bits16` for all pieces together.

        Why: a call for each piece would cost a dozen ops per parameter.
        """
        device = self._weights[0].device
        keys = [bf16_codecs.key(*clock, i.param_index, stream) for i in self._items]
        numel, start = sum(self._sizes), self._start
        if len(keys) == 1:
            return bf16_codecs.random_bits16(keys[0], numel, device, start)
        # Whole tensors: element 0 of each is element `begin` of the chunk.
        begins = [0, *accumulate(self._sizes[:-1])]
        firsts = [key[0] - begin for key, begin in zip(keys, begins, strict=True)]
        words = torch.tensor([firsts, [key[1] for key in keys]]).to(device)
        sizes = torch.tensor(self._sizes, device=device)
        first, second = words.repeat_interleave(sizes, 1, output_size=numel)
        return bf16_codecs.random_bits16((first, second), numel, device)

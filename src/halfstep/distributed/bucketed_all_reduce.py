"""Many tensors in few messages: means of gradients, and values of the first rank.

In: parameters with gradients, what each travels in, a group of processes. Out: the same
mean on each of them. A message is some 25 MiB, as in DDP; its memory is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

SIZE = 25 << 20
"""Bytes that travel together."""
_AT_ONCE = 2
"""Messages under way: one travels while the next is packed."""


class Averager:
    """Averages gradients over processes; keeps the memory of its messages.

    What travels in 16 bits is rounded once by its sender, and once by each addition on
    the way, relative to the numbers of the sum: as often as in DDP, however many
    micro-batches a gradient is the fp32 sum of.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    @torch.no_grad()
    def average(
        self,
        wires: Mapping[Tensor, torch.dtype],
        group: dist.ProcessGroup,
        *,
        headroom: int = 1,
    ) -> None:
        """Give every parameter the mean of its gradients on all ranks.

        A rank without a gradient counts as 0, and gets one if another rank has one.
        That is told in the message itself, and read by those alone who lack one: who
        has them all waits for no device.

        Args:
            wires: Parameter -> what its gradient travels in, the same on every rank,
                in one order. A gradient is divided by the number of ranks before, so
                that no sum overflows where the mean does not.
            group: All ranks.
            headroom: What gradients are divided by besides, on the way only. A power
                of two: it costs nothing but the smallest numbers.
        """
        under_way: deque[_Message] = deque()
        for number, bucket in enumerate(_buckets(list(wires), wires.__getitem__)):
            if len(under_way) == _AT_ONCE:
                under_way.popleft().unpack(headroom)
            key = (wires[bucket[0]], bucket[0].device, number % _AT_ONCE)
            message = _Message(bucket, self._numbers(bucket, key))
            message.send(group, headroom)
            under_way.append(message)
        for message in under_way:
            message.unpack(headroom)

    def _numbers(
        self, bucket: list[Tensor], key: tuple[torch.dtype, torch.device, int]
    ) -> Tensor:
        size = sum(param.numel() for param in bucket) + len(bucket)
        kept = self._memory.get(key)
        if kept is None or kept.numel() < size:
            kept = torch.empty(size, dtype=key[0], device=key[1])
            self._memory[key] = kept
        return kept[:size]


@dataclass
class _Message:
    """Gradients side by side, and behind them for each whether it is there."""

    params: list[Tensor]
    numbers: Tensor
    work: dist.Work | None = None

    def _views(self) -> Sequence[Tensor]:
        sizes = [param.numel() for param in self.params]
        return torch.split(self.numbers, [*sizes, len(sizes)])

    def send(self, group: dist.ProcessGroup, headroom: int) -> None:
        """Pack, and set off."""
        *views, flags = self._views()
        flags.fill_(1)
        for place, (param, view) in enumerate(zip(self.params, views, strict=True)):
            gradient = param.grad
            if gradient is None:
                view.zero_()
                flags[place] = 0
                continue
            if gradient.is_sparse:
                gradient = param.grad = gradient.to_dense()
            shaped = view.view(gradient.shape)
            torch.div(gradient, group.size() * headroom, out=shaped)
        self.work = dist.all_reduce(self.numbers, group=group, async_op=True)

    def unpack(self, headroom: int) -> None:
        """Wait for the sums, and put them into `.grad`."""
        assert self.work is not None, "it is under way"  # noqa: S101
        self.work.wait()
        *views, flags = self._views()
        here = [param.grad is not None for param in self.params]
        there = here if all(here) else (flags != 0).tolist()
        for param, view, is_there in zip(self.params, views, there, strict=True):
            if not is_there:
                continue
            if param.grad is None:
                param.grad = torch.empty(
                    param.shape, dtype=param.dtype, device=param.device
                )
            param.grad.copy_(view.view(param.shape))
            if headroom != 1:
                param.grad.mul_(headroom)


def _buckets(
    tensors: Sequence[Tensor], wire: Callable[[Tensor], torch.dtype]
) -> Iterator[list[Tensor]]:
    """Yield tensors that travel alike, at least one, some 25 MiB of them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((wire(tensor), tensor.device), []).append(tensor)
    for (dtype, _), alike in kinds.items():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            own = tensor.numel() * dtype.itemsize
            if bucket and size + own > SIZE:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += own
        yield bucket


@torch.no_grad()
def first_rank(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Give tensors, in place, the values they have on a group's first rank.

    They travel as bytes: not every backend knows every dtype, int16 for one.
    """
    source = dist.get_global_rank(group, 0)
    for bucket in _buckets(tensors, lambda tensor: tensor.dtype):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), source, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

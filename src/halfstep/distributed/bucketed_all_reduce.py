"""Averages many gradients over ranks in few buckets, and broadcasts tensors.

Buckets are about 25 MiB, as in DDP, and their memory is reused.
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

BUCKET_BYTES = 25 << 20
_MAX_PENDING = 2
"""Buckets in flight: one is sent while the next is packed."""


class BucketedAllReduce:
    """Averages gradients over ranks, and reuses the memory of its buckets.

    A gradient sent in 16 bits is rounded once by its sender, and once by each addition
    on the way, relative to the sum: as often as in DDP, even if it is the fp32 sum of
    many micro-batches.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    @torch.no_grad()
    def mean_(
        self,
        comm_dtypes: Mapping[Tensor, torch.dtype],
        group: dist.ProcessGroup,
        *,
        num_summed: int = 1,
    ) -> None:
        """Replace each parameter's gradient by the mean over all ranks.

        A missing gradient counts as 0, and is created if another rank has one. Only
        ranks with missing gradients read the flags in the buffer, which synchronizes.

        Args:
            comm_dtypes: Parameter -> dtype in which its gradient is sent; same entries
                and order on every rank. Gradients are divided by the number of ranks
                before the sum, so that it overflows only if the mean does.
            group: All ranks.
            num_summed: Micro-batches in each gradient. In fp16 their sum may overflow
                where none of them did, so it is divided while it is sent, by a power of
                two, which changes only the smallest values.
        """
        pending: deque[_BucketReduction] = deque()
        buckets = _buckets(list(comm_dtypes), comm_dtypes.__getitem__)
        for number, bucket in enumerate(buckets):
            if len(pending) == _MAX_PENDING:
                pending.popleft().finish()
            dtype = comm_dtypes[bucket[0]]
            key = (dtype, bucket[0].device, number % _MAX_PENDING)
            factor = 1 << (num_summed - 1).bit_length() if dtype == torch.float16 else 1
            reduction = _BucketReduction(bucket, self._buffer(bucket, key), factor)
            reduction.start(group)
            pending.append(reduction)
        for reduction in pending:
            reduction.finish()

    def _buffer(
        self, bucket: list[Tensor], key: tuple[torch.dtype, torch.device, int]
    ) -> Tensor:
        size = sum(param.numel() for param in bucket) + len(bucket)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=key[0], device=key[1])
            self._buffers[key] = buffer
        return buffer[:size]


@dataclass
class _BucketReduction:
    """A buffer with several gradients, then flags of which gradients exist."""

    params: list[Tensor]
    buffer: Tensor
    predivide_factor: int
    """Divisor besides the number of ranks while the gradients are sent."""
    work: dist.Work | None = None

    def _views(self) -> Sequence[Tensor]:
        sizes = [param.numel() for param in self.params]
        return torch.split(self.buffer, [*sizes, len(sizes)])

    def start(self, group: dist.ProcessGroup) -> None:
        """Pack the buffer and start the all-reduce."""
        *views, flags = self._views()
        flags.fill_(1)
        for index, (param, view) in enumerate(zip(self.params, views, strict=True)):
            grad = param.grad
            if grad is None:
                view.zero_()
                flags[index] = 0
                continue
            if grad.is_sparse:
                grad = param.grad = grad.to_dense()
            shaped = view.view(grad.shape)
            torch.div(grad, group.size() * self.predivide_factor, out=shaped)
        self.work = dist.all_reduce(self.buffer, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums and write them to `.grad`."""
        assert self.work is not None, "start() comes first"  # noqa: S101
        self.work.wait()
        *views, flags = self._views()
        has_grad = [param.grad is not None for param in self.params]
        has_mean = has_grad if all(has_grad) else (flags != 0).tolist()
        for param, view, has_value in zip(self.params, views, has_mean, strict=True):
            if not has_value:
                continue
            if param.grad is None:
                param.grad = param.new_empty(param.shape)
            param.grad.copy_(view.view(param.shape))
            if self.predivide_factor != 1:
                param.grad.mul_(self.predivide_factor)


def _buckets(
    tensors: Sequence[Tensor], comm_dtype: Callable[[Tensor], torch.dtype]
) -> Iterator[list[Tensor]]:
    """Yield non-empty lists of tensors with one dtype and device, about 25 MiB each."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((comm_dtype(tensor), tensor.device), []).append(tensor)
    for (dtype, _), group in groups.items():
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            nbytes = tensor.numel() * dtype.itemsize
            if bucket and size + nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += nbytes
        yield bucket


@torch.no_grad()
def broadcast_(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with the values of the group's first rank.

    They are sent as bytes, since not every backend supports every dtype, such as int16.
    """
    source = dist.get_global_rank(group, 0)
    for bucket in _buckets(tensors, lambda tensor: tensor.dtype):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), source, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

"""Device-to-host copies that are read some steps later, without synchronization."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

N = TypeVar("N")

DELAY_STEPS = 2
"""Steps after which numbers of a GPU are read. By then they have arrived, unless the
host has run ahead further than does any good; then it waits for them, once a step."""


def is_cpu(device: torch.device) -> bool:
    """Say whether the host can read a tensor there without waiting for anybody."""
    return device.type == "cpu"


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on another device, which is not waited for.

    Towards the host it is: nobody could know when the numbers have come.
    """
    return tensor.to(device, non_blocking=not is_cpu(device))


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Return what happens on a GPU once all that was asked of it so far is done.

    Why its own stream: the present one may be another GPU's, which copies nothing.
    """
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class DelayedScalars:
    """Brings small device values to the host some steps late, so that no step waits.

    Why a fixed number: what a rank does with them, such as ending the run or stepping
    a schedule, every rank must do in the same step. Which of the newest have arrived
    differs from rank to rank.

    Where there is nothing to wait for, values arrive at once; on devices other than
    CUDA too, which do wait.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @property
    def num_pending(self) -> int:
        """Number of copies not read yet."""
        return len(self._pending)

    def submit(self, values: Sequence[Tensor]) -> list[float] | None:
        """Start to fetch numbers; return those of `DELAY_STEPS` submits ago, or None.

        The first tensor says where they are. Each is sent flat, one after the other.
        """
        device = values[0].device
        if device.type != "cuda":
            host_values: list[float] = []
            for v in values:
                host_values += [float(v)] if v.numel() == 1 else v.flatten().tolist()
            return host_values
        flat_values = [
            to_device_async(v.reshape(-1), device).to(torch.float32) for v in values
        ]
        host = torch.empty(sum(v.numel() for v in flat_values), pin_memory=True)
        host.copy_(torch.cat(flat_values), non_blocking=True)
        self._pending.append((host, _record_event(device)))
        if len(self._pending) <= DELAY_STEPS:
            return None
        arrived, event = self._pending.popleft()
        event.synchronize()
        numbers: list[float] = arrived.tolist()
        return numbers

    def read_pending(self) -> list[list[float]]:
        """Return what has not arrived, oldest first, and leave it there. Waits."""
        pending_values = []
        for numbers, event in self._pending:
            event.synchronize()
            pending_values.append(numbers.tolist())
        return pending_values


class DelayedTensors(Generic[N]):
    """Brings whole tensors to the host some steps late, each with a note of what it is.

    As with `DelayedScalars`, where there is nothing to wait for they arrive at once.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[N, list[Tensor], torch.cuda.Event | None]] = deque()

    def submit(
        self, note: N, tensors: Sequence[Tensor]
    ) -> list[tuple[N, list[Tensor]]]:
        """Start to fetch tensors; return what has arrived, oldest first.

        They are on one device, and not written to after this; `note` comes back, too.
        """
        cuda_device = next((t.device for t in tensors if t.device.type == "cuda"), None)
        if cuda_device is None:
            self._pending.append((note, [t.cpu() for t in tensors], None))
            return self.flush()
        host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for destination, source in zip(host, tensors, strict=True):
            destination.copy_(source, non_blocking=True)
        self._pending.append((note, host, _record_event(cuda_device)))
        return self._pop_oldest(DELAY_STEPS)

    def flush(self) -> list[tuple[N, list[Tensor]]]:
        """Return all that is under way. Waits for it."""
        return self._pop_oldest(0)

    def _pop_oldest(self, num_left: int) -> list[tuple[N, list[Tensor]]]:
        arrived = []
        while len(self._pending) > num_left:
            note, host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            arrived.append((note, host))
        return arrived

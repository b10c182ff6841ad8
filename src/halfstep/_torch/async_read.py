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
"""Steps after which a GPU's values are read. By then they have arrived, unless the host
is unusually far ahead; then it waits for them, once per step."""

READABLE_DEVICES = frozenset({"cpu"})
"""Types of devices whose tensors the host reads without synchronization."""


def is_capturing() -> bool:
    """Return whether a CUDA graph captures the current stream: nothing can be read."""
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_initialized and torch.cuda.is_current_stream_capturing()


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on another device; copies from the host do not block.

    Copies to the host block, since the host could not know when the values arrive.
    """
    return tensor.to(device, non_blocking=device.type not in READABLE_DEVICES)


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Return an event after all work submitted to a GPU's current stream so far.

    Why name the stream: the current device may be another GPU, which copies nothing.
    """
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class DelayedTensors(Generic[N]):
    """Copies tensors to the host some steps late, each with a note, so no step waits.

    Why a fixed delay: every rank must end the run or step a schedule in the same step,
    and which of the newest values have arrived differs from rank to rank. Except on
    CUDA, values arrive at once, where reading waits.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[N, list[Tensor], torch.cuda.Event]] = deque()

    def __len__(self) -> int:
        """Return the number of copies not read yet."""
        return len(self._pending)

    def submit(
        self, note: N, tensors: Sequence[Tensor]
    ) -> list[tuple[N, list[Tensor]]]:
        """Start a copy of tensors; return those of `DELAY_STEPS` calls ago, if any.

        The tensors must be on one device, and must not be modified afterwards. Results
        are (note, tensors) pairs.
        """
        cuda_device = next((t.device for t in tensors if t.device.type == "cuda"), None)
        if cuda_device is None:
            return [*self.flush(), (note, [t.cpu() for t in tensors])]
        host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for destination, source in zip(host, tensors, strict=True):
            destination.copy_(source, non_blocking=True)
        self._pending.append((note, host, _record_event(cuda_device)))
        if len(self) <= DELAY_STEPS:
            return []
        note, host, event = self._pending.popleft()
        event.synchronize()
        return [(note, host)]

    def flush(self) -> list[tuple[N, list[Tensor]]]:
        """Return all pending tensors with their notes. Waits."""
        arrived = self.peek()
        self._pending.clear()
        return arrived

    def peek(self) -> list[tuple[N, list[Tensor]]]:
        """Return all pending tensors with their notes, and keep them pending. Waits."""
        for _, _, event in self._pending:
            event.synchronize()
        return [(note, host) for note, host, _ in self._pending]


class DelayedScalars:
    """Copies small device values to the host some steps late, as `DelayedTensors`."""

    def __init__(self) -> None:
        self._copies: DelayedTensors[None] = DelayedTensors()

    def __reduce__(self) -> tuple[type[DelayedScalars], tuple[()]]:
        """Make copies, and pickles, empty: events cannot be copied."""
        return type(self), ()

    @property
    def num_pending(self) -> int:
        """Number of copies not read yet."""
        return len(self._copies)

    def submit(self, values: Sequence[Tensor]) -> list[float] | None:
        """Start a copy of values; return those of `DELAY_STEPS` calls ago, or None.

        The first tensor determines the device. The tensors are flattened and
        concatenated.
        """
        device = values[0].device
        if device.type != "cuda":
            host_values: list[float] = []
            for v in values:
                host_values += [float(v)] if v.numel() == 1 else v.flatten().tolist()
            return host_values
        # `cat` promotes dtypes: few launches, as this is on every step.
        flat = torch.cat([to_device_async(v.reshape(-1), device) for v in values])
        arrived = self._copies.submit(None, [flat.to(torch.float32)])
        return arrived[0][1][0].tolist() if arrived else None

    def read_pending(self) -> list[list[float]]:
        """Return all pending values, oldest first, and keep them pending. Waits."""
        return [numbers.tolist() for _, (numbers,) in self._copies.peek()]

"""Device values for the host, without waiting for the device.

In: small tensors. Out: their numbers, at once where that costs nothing, otherwise a
fixed number of steps late.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

N = TypeVar("N")

LAG = 2
"""Steps after which numbers of a GPU are read. By then they have arrived, unless the
host has run ahead further than does any good; then it waits for them, once a step."""


def on_host(device: torch.device) -> bool:
    """Say whether the host can read a tensor there without waiting for anybody."""
    return device.type == "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on another device, which is not waited for.

    Towards the host it is: nobody could know when the numbers have come.
    """
    return tensor.to(device, non_blocking=not on_host(device))


def _mark(device: torch.device) -> torch.cuda.Event:
    """Return what happens on a GPU once all that was asked of it so far is done.

    Why its own stream: the present one may be another GPU's, which copies nothing.
    """
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Late:
    """Brings small device values to the host some steps late, so that nobody waits.

    Why a fixed number: what a rank does with them, such as ending the run or stepping
    a schedule, every rank must do in the same step. Which of the newest have arrived
    differs from rank to rank.

    Where there is nothing to wait for, values arrive at once; on devices other than
    CUDA too, which do wait.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @property
    def behind(self) -> int:
        """How many sendings have not arrived."""
        return len(self._under_way)

    def send(self, values: Sequence[Tensor]) -> list[float] | None:
        """Start to fetch numbers; return those of `LAG` sendings ago, or None.

        Args:
            values: Tensors, mostly of one element; the first says where they are. Each
                is sent flat, one after the other.
        """
        device = values[0].device
        if device.type != "cuda":
            there: list[float] = []
            for v in values:
                there += [float(v)] if v.numel() == 1 else v.flatten().tolist()
            return there
        here = [moved(v.reshape(-1), device).to(torch.float32) for v in values]
        host = torch.empty(sum(v.numel() for v in here), pin_memory=True)
        host.copy_(torch.cat(here), non_blocking=True)
        self._under_way.append((host, _mark(device)))
        if len(self._under_way) <= LAG:
            return None
        arrived, event = self._under_way.popleft()
        event.synchronize()
        numbers: list[float] = arrived.tolist()
        return numbers

    def coming(self) -> list[list[float]]:
        """Return what has not arrived, oldest first, and leave it there. Waits."""
        found = []
        for numbers, event in self._under_way:
            event.synchronize()
            found.append(numbers.tolist())
        return found


class Parcels(Generic[N]):
    """Brings whole tensors to the host some steps late, each with a note of what it is.

    As with `Late`, where there is nothing to wait for they arrive at once.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[N, list[Tensor], torch.cuda.Event | None]] = (
            deque()
        )

    def send(self, note: N, tensors: Sequence[Tensor]) -> list[tuple[N, list[Tensor]]]:
        """Start to fetch tensors; return what has arrived, oldest first.

        Args:
            note: Comes back with them.
            tensors: On one device, and not written to after this.
        """
        there = next((t.device for t in tensors if t.device.type == "cuda"), None)
        if there is None:
            self._under_way.append((note, [t.cpu() for t in tensors], None))
            return self.flush()
        host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for mine, theirs in zip(host, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._under_way.append((note, host, _mark(there)))
        return self._taken(LAG)

    def flush(self) -> list[tuple[N, list[Tensor]]]:
        """Return all that is under way. Waits for it."""
        return self._taken(0)

    def _taken(self, left: int) -> list[tuple[N, list[Tensor]]]:
        found = []
        while len(self._under_way) > left:
            note, host, event = self._under_way.popleft()
            if event is not None:
                event.synchronize()
            found.append((note, host))
        return found

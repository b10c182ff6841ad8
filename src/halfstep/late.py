"""Device values for the host, without waiting for the device.

In: small tensors. Out: their numbers, at once where that costs nothing, otherwise one
step late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def on_host(device: torch.device) -> bool:
    """Say whether the host can read a tensor there without waiting for anybody."""
    return device.type == "cpu"


class Late:
    """Brings small device values to the host one step late, so that nobody waits.

    Where there is nothing to wait for, values arrive at once.
    """

    def __init__(self) -> None:
        self._under_way: tuple[Tensor, torch.cuda.Event] | None = None

    def send(self, values: Sequence[Tensor]) -> list[float] | None:
        """Start to fetch numbers; return the newest that have arrived, or None.

        Args:
            values: Tensors of one element; the first says where they are.
        """
        device = values[0].device
        if on_host(device):
            return [float(value) for value in values]
        moved = [v.reshape(()).to(device, torch.float32) for v in values]
        arrived = None
        if self._under_way is not None and self._under_way[1].query():  # type: ignore[no-untyped-call]
            arrived = self._under_way[0].tolist()
        host = torch.empty(len(moved), pin_memory=True)
        host.copy_(torch.stack(moved), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._under_way = (host, event)
        return arrived

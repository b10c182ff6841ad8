"""Tracks on the host what is known of a scale on a device, without reading it.

In: who has written it. Out: its value, if that is known, and whether it is a power of
two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from halfstep._torch import async_read

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_HIGHEST = torch.finfo(torch.float32).max


def is_power_of_two(number: float) -> bool:
    """Say whether multiplying by it is exact."""
    return math.frexp(number)[0] == 0.5  # noqa: PLR2004 -- as frexp has it


class HostScale:
    """Follows a tensor that others may replace or write to."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._version = 0
        self.is_power_of_two = False
        """It is a power of two."""

    def poll(self, scale: Tensor, init_scale: float) -> float | None:
        """Say what somebody else has set it to; None if nobody has.

        Args:
            scale: As it is now, shape ().
            init_scale: What a new one begins with.

        Returns:
            0 if it was written to where nobody can read it without waiting.
        """
        is_new = scale is not self._tensor
        if not is_new and scale._version == self._version:  # noqa: SLF001
            return None
        value = init_scale if is_new else 0.0
        value = scale.item() if async_read.is_cpu(scale.device) else value
        self.mark_written(scale)
        self.is_power_of_two = is_power_of_two(value)
        return value

    def mark_written(self, scale: Tensor) -> None:
        """Take note that it was written to by its owner."""
        self._tensor, self._version = scale, scale._version  # noqa: SLF001

    def mark_multiplied(self, numbers: Iterable[float]) -> None:
        """Take note of what it may be multiplied by, or set to."""
        all_powers = all(is_power_of_two(one) for one in numbers if one != _HIGHEST)
        self.is_power_of_two = self.is_power_of_two and all_powers

"""Saves and restores the random state of torch, Python and numpy."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class RandomState:
    """Snapshot of the random state of torch (CPU and devices), Python and numpy."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = {
            device: torch.cuda.get_rng_state(device)
            for device in devices
            if device.type == "cuda"
        }
        self._python_state = random.getstate()
        # Only if it is in use: halfstep itself does not import it.
        self._numpy = sys.modules.get("numpy")
        self._numpy_state = self._numpy.random.get_state() if self._numpy else None

    def restore(self) -> None:
        """Restore the saved state."""
        torch.set_rng_state(self._cpu_state)
        for device, state in self._cuda_states.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)

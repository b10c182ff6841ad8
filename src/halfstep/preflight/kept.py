"""What a pass changes besides gradients: buffers and random state, to be put back.

In: a model, devices. Out: values that remember, and restore.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Buffers:
    """The buffers of a model, as they were when this was made.

    By name, not as tensors alone: a module may put another tensor in the place of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001 -- None too
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back: the same tensors, with the same values."""
        for module, name, buffer, value in self._kept:
            if module._buffers.get(name) is not buffer:  # noqa: SLF001
                module._buffers[name] = buffer  # noqa: SLF001
            if buffer is None or value is None or torch.equal(buffer, value):
                continue
            buffer.copy_(value)


class RandomState:
    """The random state of torch, Python and numpy, as it was when this was made.

    Args:
        devices: Devices whose generators count besides the CPU's.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {
            device: torch.cuda.get_rng_state(device)
            for device in devices
            if device.type == "cuda"
        }
        self._python = random.getstate()
        # Only if somebody uses it: the library does not.
        self._numpy = sys.modules.get("numpy")
        self._numpys = self._numpy.random.get_state() if self._numpy else None

    def restore(self) -> None:
        """Put all of it back."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpys)

"""The buffers of a model, which a pass changes, to be put back.

In: a model. Out: a value that remembers, and restores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


class BufferSnapshot:
    """The buffers of a model, as they were when this was made.

    By name, not as tensors alone: a module may put another tensor in the place of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001 -- None too
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back: the same tensors, with the same values."""
        for module, name, buffer, value in self._saved:
            if module._buffers.get(name) is not buffer:  # noqa: SLF001
                module._buffers[name] = buffer  # noqa: SLF001
            if buffer is None or value is None or torch.equal(buffer, value):
                continue
            buffer.copy_(value)

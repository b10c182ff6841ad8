"""Networks with one known weakness each, for a check before training to find.

In: nothing. Out: models, batches, and a loss.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


def batch(size: int = 32) -> Batch:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(size, 16, generator=draw)
    return x, torch.randn(size, 8, generator=draw)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.mse_loss(model(x), y)


class Net(nn.Module):
    """Healthy; `gain` makes what `loud` gives as much larger."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU())
        self.drop = nn.Dropout(0.2)
        self.loud = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)
        with torch.no_grad():
            self.loud.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.loud(self.drop(self.inner(x))))
        return self.head(out)


LOUD = 1e6
"""A gain at which `Net.loud` gives more than fp16 holds."""

"""A small network to record, and the rows of a region's report.

In: a model, a region. Out: its loss, its report's rows.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return torch.softmax(self.body(x), -1)


X = torch.linspace(-1, 1, 8).view(2, 4)
"""Eight numbers: 16 bytes in 16 bits, 32 in fp32."""


def loss(model: nn.Module) -> Tensor:
    """Return a loss in fp32."""
    return nn.functional.mse_loss(model(X), X)


Row = tuple[Any, ...]


def rows(region: Any) -> list[Row]:
    """Return a report's rows."""
    return list(region.report().rows)

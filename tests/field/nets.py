"""What most programs of reports begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tests.field.report import Amp

BATCH, WIDTH = 16, 8


def linear(
    amp: Amp, *, scale: float = 1024.0, lr: float = 0.01, outputs: int = 1
) -> tuple[nn.Linear, torch.optim.SGD, Any]:
    """Return a layer, its optimizer, and a scaler."""
    model = nn.Linear(WIDTH, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, amp.scaler(init_scale=scale)


def batch() -> torch.Tensor:
    """Return inputs."""
    return torch.randn(BATCH, WIDTH)

"""What most programs of reports begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.field.report import Program
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

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


def mean_square(y: Tensor) -> Tensor:
    """Return a harmless loss."""
    return y.float().square().mean()


class Between(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, WIDTH), function
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the outer layer makes of the function."""
        return self.outer(self.function(self.inner(x)))  # type: ignore[no-any-return]


def training(
    amp: Amp,
    model: nn.Module,
    *,
    loss_of: Callable[[Tensor], Tensor] = mean_square,
    x: Tensor | None = None,
) -> Program:
    """Return a loop in float16, sick if no step is made or the loss is not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler, updates, losses = amp.scaler(init_scale=16.0), [], []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    batch = torch.randn(4, WIDTH) if x is None else x

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = loss_of(model(batch))
        losses.append(loss.detach())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def is_sick() -> bool:
        return not updates or not bool(losses[-1].isfinite())

    return Program(model, step, is_sick)

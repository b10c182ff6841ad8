"""An image classifier as programs of apex write one: levels, a schedule, resuming.

In: a level, perhaps a checkpoint. Out: losses, accuracy, a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from apex import amp
from apex.optimizers import FusedSGD
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        out = nn.functional.relu(self.bn1(self.conv1(x)))
        return nn.functional.relu(self.bn2(self.conv2(out)) + x)


def build() -> nn.Module:
    """Return a small residual network."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), Block(8), *head)


def pictures(seed: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Return pictures with a bright quarter, and which one it is."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=draw)
    images = torch.randn(count, 1, 8, 8, generator=draw) * 0.3
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[0, row : row + 4, column : column + 4] += float(1 + label)
    return images, labels


def main(
    opt_level: str = "O1",
    keep_batchnorm_fp32: str | None = None,
    loss_scale: str | None = None,
    steps: int = 24,
    start: int = 0,
    checkpoint: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train from one step to another; return what happened, and a checkpoint."""
    torch.manual_seed(0)
    model = build()
    optimizer = FusedSGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=opt_level,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        loss_scale=loss_scale,
        verbosity=0,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.5)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        amp.load_state_dict(checkpoint["amp"])
    losses = []
    for step in range(start, steps):
        images, labels = pictures(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "amp": amp.state_dict(),
    }
    model.eval()
    with torch.no_grad():
        images, labels = pictures(1000, 64)
        right = (model(images).argmax(-1) == labels).float().mean().item()
    return {"losses": losses, "accuracy": right, "checkpoint": state}


if __name__ == "__main__":
    main()

"""Image classification as apex's own example has it: flags, warm-up, meters, resuming.

In: words of a command line. Out: what an evaluation after each epoch found.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel as DDP  # noqa: N817
from apex.parallel import convert_syncbn_model
from torch import Tensor, nn


class Meter:
    """A mean over what it was given."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int = 1) -> None:
        """Add a mean over some examples."""
        self.sum += value * count
        self.count += count

    @property
    def avg(self) -> float:
        """The mean."""
        return self.sum / self.count


def parse(words: list[str]) -> argparse.Namespace:
    """Return what a command line says; amp's options are strings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args(words)


def loader(seed: int, count: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Return batches of pictures with a bright quarter, and which one it is."""
    draw = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        labels = torch.randint(0, 4, (32,), generator=draw)
        images = torch.randn(32, 3, 8, 8, generator=draw) * 0.3
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = 4 * (label // 2), 4 * (label % 2)
            image[:, row : row + 4, column : column + 4] += 1.0
        batches.append((images, labels))
    return batches


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of right answers, in per cent."""
    return (output.argmax(1) == target).float().mean() * 100


def adjust(optimizer: Any, lr: float, epoch: int, step: int, steps: int) -> None:
    """Warm up over the first epoch."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (1 + step + epoch * steps) / steps)


def train(
    model: nn.Module, optimizer: Any, args: argparse.Namespace, epoch: int
) -> tuple[float, float]:
    """Train for an epoch; return the mean of losses and of accuracies."""
    losses, top1 = Meter(), Meter()
    model.train()
    criterion = nn.CrossEntropyLoss()
    batches = loader(epoch)
    for step, (images, target) in enumerate(batches):
        adjust(optimizer, args.lr, epoch, step, len(batches))
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(target))
        top1.update(accuracy(output, target).item(), len(target))
    return losses.avg, top1.avg


def validate(model: nn.Module) -> float:
    """Return the accuracy on pictures of its own."""
    top1 = Meter()
    model.eval()
    for images, target in loader(1000, 4):
        with torch.no_grad():
            output = model(images)
        top1.update(accuracy(output, target).item(), len(target))
    return top1.avg


def main(words: list[str]) -> list[tuple[float, float, float]]:
    """Train and evaluate; return loss and both accuracies of each epoch."""
    args = parse(words)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    torch.manual_seed(0)
    model = network()
    if args.sync_bn:
        model = convert_syncbn_model(model)
    optimizer: Any = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4
    )
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=0,
    )
    if distributed:
        dist.init_process_group("gloo")
        model = DDP(model)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
    found = []
    for epoch in range(start, args.epochs):
        loss, prec1 = train(model, optimizer, args, epoch)
        found.append((loss, prec1, validate(model)))
        if args.save:
            checkpoint = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(checkpoint, f"{args.save}.{epoch + 1}")
    return found


if __name__ == "__main__":
    main([])

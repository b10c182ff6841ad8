"""`halfstep bench conv`: training steps of a small ResNet.

Images of noise whose mean brightness is shifted by their class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import commands, encoder
from halfstep.bench.training import training

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

CLASSES = 10


def make_model(work: Namespace) -> nn.Module:
    """Build a ResNet of four stages, each of twice the channels of the one before."""
    from transformers import ResNetConfig, ResNetForImageClassification

    settings: dict[str, Any] = {
        "embedding_size": work.channels,
        "hidden_sizes": [work.channels * 2**stage for stage in range(4)],
        "depths": [work.layers] * 4,
        "layer_type": "basic",
        "num_labels": CLASSES,
    }
    model: Any = ResNetForImageClassification(ResNetConfig(**settings))
    converted: nn.Module = model.to(memory_format=_order(work))
    return converted


def _order(work: Namespace) -> torch.memory_format:
    is_last = work.format == "channels-last"
    return torch.channels_last if is_last else torch.contiguous_format


def draw_batches(work: Namespace, seed: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of each step, without end."""
    draw = torch.Generator().manual_seed(seed)
    shape = work.batch, 3, work.pixels, work.pixels

    def batch() -> dict[str, Tensor]:
        labels = torch.randint(CLASSES, (work.batch,), generator=draw)
        images = torch.randn(shape, generator=draw)
        images += (labels / CLASSES - 0.5)[:, None, None, None]
        images = images.to(work.device, memory_format=_order(work))
        return {"pixel_values": images, "labels": labels.to(work.device)}

    while True:
        yield [batch() for _ in range(work.accumulate)]


BENCHES = {
    "conv": training(
        title="Training a convolutional network",
        description="Train a small ResNet from scratch on synthetic images, several "
        "seeds of each candidate; print time, memory and losses.",
        flags={
            "layers": commands.flag("blocks of each of the four stages", 2),
            "channels": commands.flag("channels of the first stage", 32),
            "pixels": commands.flag("rows and columns of an image", 96),
            "batch": commands.flag("images of a micro-batch", 16),
            "accumulate": commands.flag(commands.ACCUMULATE, 1),
            "steps": commands.flag(
                "steps of each run; the first three are not timed", 40
            ),
            "seeds": commands.flag("runs of each candidate", 3),
            "lr": commands.flag("learning rate of AdamW", 1e-3, commands.share, "X"),
            "format": commands.choice(
                "memory format", "channels-first", "channels-last"
            ),
        },
        kinds=encoder.KINDS,
        check=encoder.check_steps,
        make_model=make_model,
        draw_batches=draw_batches,
        make_optimizer=encoder.make_optimizer,
        loss_of=encoder.loss_of,
    ),
}

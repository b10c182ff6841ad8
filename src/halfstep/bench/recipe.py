"""`halfstep bench recipe`: training steps of torch's AMP recipe network.

A few large linear layers with ReLU and mean squared error, so that memory traffic
matters as much as matmuls.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import commands, loops
from halfstep.bench.training import Training

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

MOMENTUM = {"sgd": 0.0, "sgd-momentum": 0.9, "adamw": 0.0}


def make_network(work: Namespace) -> nn.Module:
    """Build `work.layers` layers of `work.width` x `work.width`, with ReLU between."""
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def draw_batches(work: Namespace, _seed: int) -> Iterator[list[Any]]:
    """Yield the micro-batches, the same for every step."""
    torch.manual_seed(0)
    shape = work.batch, work.width

    def draw() -> Tensor:
        return torch.randn(shape, device=work.device)

    return itertools.repeat([(draw(), draw()) for _ in range(work.accumulate)])


def make_optimizer(
    parameters: Iterable[Tensor], work: Namespace
) -> torch.optim.Optimizer:
    """Return the optimizer of the workload, with torch's defaults.

    A mean over all outputs has such small gradients that no loss would move at usual
    learning rates, and candidates that do nothing would go unnoticed. So SGD's rate is
    scaled by the largest curvature, about (1 + sqrt(width / batch))**2 / width.
    """
    if work.optimizer == "adamw":
        # Updates of about 0.1% of a weight, as in healthy training.
        return torch.optim.AdamW(parameters, 0.05 / work.width)
    momentum = MOMENTUM[work.optimizer]
    curvature = (1 + math.sqrt(work.width / work.batch)) ** 2 / work.width
    return torch.optim.SGD(parameters, 0.06 * (1 - momentum) / curvature, momentum)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of a micro-batch."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


BENCHES = {
    "recipe": Training(
        title="Mixed precision recipe",
        description="Train a few large linear layers (torch's AMP recipe) at every "
        "level and with every form of master weights, each in its own process; print "
        "time, memory and loss. Widths that are no multiple of 8, such as 513, show "
        "what alignment costs.",
        kinds={n: c for n, c in loops.CANDIDATES.items() if " " not in n},
        flags={
            "layers": commands.flag("linear layers, with ReLU between", 3),
            "width": commands.flag("inputs and outputs of each layer", 4096),
            "batch": commands.flag("examples of one micro-batch", 512),
            "accumulate": commands.flag(commands.ACCUMULATE, 1),
            "optimizer": commands.choice("what updates the weights", *MOMENTUM),
            "steps": commands.flag("steps of a candidate in a round", 3),
            "rounds": commands.flag("rounds, in which each candidate takes a turn", 9),
        },
        make_model=make_network,
        draw_batches=draw_batches,
        make_optimizer=make_optimizer,
        loss_of=loss_of,
        baselines=("torch.amp", "torch.amp-kept", "pure"),
    ),
}

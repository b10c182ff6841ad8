"""Data parallel training as programs of apex write it, under torchrun.

In: two processes, each with weights and data of its own. Out: a line of JSON from the
first: what each level found.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.compat.apex import amp
from halfstep.compat.apex.parallel import DistributedDataParallel
from halfstep.distributed import process_group

LEVELS = ("O0", "O1", "O2", "O3")


def equal_everywhere(tensors: list[Tensor]) -> bool:
    """Say whether all ranks hold the same numbers."""
    same = True
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.detach().contiguous())
        same = same and all(torch.equal(gathered[0], other) for other in gathered)
    return same


def train(level: str) -> dict[str, Any]:
    """Train three steps, the second with an inf on the last rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    net.append(nn.Linear(4 * 16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    kwargs = {"loss_scale": "dynamic"}
    net, optimizer = amp.initialize(
        net, optimizer, opt_level=level, verbosity=0, **kwargs
    )
    model = DistributedDataParallel(net)
    before = [p.detach().clone() for p in net.parameters()]
    scales = []
    for step in range(3):
        x, y = torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))
        if step == 1 and rank:
            x[0, 0, 0, 0] = torch.inf
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    masters = list(amp.master_params(optimizer))
    pairs = list(zip(net.parameters(), masters, strict=True))
    return {
        "masters equal": equal_everywhere(masters),
        "models equal": equal_everywhere(list(net.parameters())),
        "model is master": all(torch.equal(p, m.to(p.dtype)) for p, m in pairs),
        "learnt": not torch.equal(net[-1].weight, before[-2]),
        "scales": scales,
    }


def main() -> None:
    """Run all levels."""
    with process_group.join("cpu"):
        found = {level: train(level) for level in LEVELS}
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

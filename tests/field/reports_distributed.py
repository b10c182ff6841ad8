"""Several processes: what they send each other in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tests.field.nets import is_nonfinite, loop
from tests.field.report import Program, report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

if TYPE_CHECKING:
    from tests.field.report import Amp


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return nn.parallel.DistributedDataParallel(model)


@report(says=r"fp16_compress_hook", truth="compress_hook")
def compressed_gradients(amp: Amp, *, cured: bool) -> Program:
    layer = nn.Linear(8, 1)
    model = data_parallel(layer)
    if not cured:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-9)
    x = 300 * torch.randn(16, 8)

    def loss_of() -> torch.Tensor:
        return (model(x).float() - 1000).square().mean()

    low = torch.bfloat16
    is_sick = is_nonfinite(layer.weight)
    return loop(amp, model, loss_of, optimizer, dtype=low, is_sick=is_sick)

"""Several processes: what they send each other in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tests.field.nets import is_nonfinite, loop
from tests.field.report import Program, reports_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

if TYPE_CHECKING:
    from tests.field.report import Amp

report = reports_of("several processes")


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    """Return the model in DDP, with this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return nn.parallel.DistributedDataParallel(model)


@report(
    "pytorch/pytorch#57410 pytorch/pytorch#59522",
    symptom="With compressed communication, finite gradients become inf.",
    cause="DDP's hook sends gradients in float16, which holds 65504.",
    says=r"fp16_compress_hook",
    truth="compress_hook",
    cure="Leave the hook out; on GPUs `bf16_compress_hook` reaches as far as float32.",
)
def compressed_gradients(amp: Amp, *, cured: bool) -> Program:
    """Train with large gradients and the hook."""
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

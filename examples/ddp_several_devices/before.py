"""DDP, a process for two devices: each has a part of the model.

Run: torchrun --standalone --nproc-per-node 2 before.py
"""

import os

import torch
from torch import Tensor, distributed, nn
from torch.amp import GradScaler, autocast

distributed.init_process_group()
rank, local_rank = distributed.get_rank(), int(os.environ["LOCAL_RANK"])
many = torch.cuda.device_count() >= 4
device = "cuda" if many else "cpu"
dtype = torch.float16 if many else torch.bfloat16
places = (
    [f"cuda:{2 * local_rank}", f"cuda:{2 * local_rank + 1}"] if many else ["cpu"] * 2
)


class TwoDevices(nn.Module):
    """A net whose second layer lies on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64).to(places[0])
        self.second = nn.Linear(64, 1).to(places[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().to(places[1]))


torch.manual_seed(rank)
inputs = torch.randn(40, 32, 32)
targets = inputs.sin().sum(-1, keepdim=True) / 4
targets = targets.to(places[1])
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(TwoDevices())
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    with autocast(device, dtype):
        loss = nn.functional.mse_loss(model(x.to(places[0])), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

if rank == 0:
    print(f"final loss {loss.item():.4f}")
distributed.barrier()
distributed.destroy_process_group()

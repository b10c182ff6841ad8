"""DDP with accumulation: gradients travel with the last micro-batch only.

Run: torchrun --standalone --nproc-per-node 2 before.py
"""

import contextlib
import os

import torch
from torch import distributed, nn
from torch.amp import GradScaler, autocast

WINDOW = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
distributed.init_process_group()
torch.manual_seed(distributed.get_rank())
inputs = torch.randn(40, 32, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
model = nn.parallel.DistributedDataParallel(model)
scaler = GradScaler(device)

for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
    last = (number + 1) % WINDOW == 0
    with contextlib.nullcontext() if last else model.no_sync():
        with autocast(device, dtype):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss / WINDOW).backward()
    if last:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

if distributed.get_rank() == 0:
    print(f"final loss {loss.item():.4f}")
distributed.barrier()
distributed.destroy_process_group()

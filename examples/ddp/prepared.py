"""The same with one session: it is prepared, then wrapped.

Run: torchrun --standalone --nproc-per-node 2 prepared.py
"""

import os

import torch
from torch import distributed, nn

import halfstep as hs

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
session = hs.prepare(model, optimizer, level="O2", dtype=dtype)
session.model = nn.parallel.DistributedDataParallel(model)

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        loss = nn.functional.mse_loss(session.model(x), y)
    session.backward(loss)
    session.step()

if distributed.get_rank() == 0:
    print(f"final loss {loss.item():.4f}")
distributed.barrier()
distributed.destroy_process_group()

"""The same with one session: its shards are the fp32 masters, steps are checked.

Run: torchrun --standalone --nproc-per-node 2 prepared.py
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
distributed.init_process_group()
mesh = distributed.init_device_mesh(device, (distributed.get_world_size(),))
torch.manual_seed(distributed.get_rank())
inputs = torch.randn(40, 32, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
policy = hs.fsdp.fsdp_policy("O2", "bf16")
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
session = hs.prepare(model, optimizer, level="O2", dtype="bf16")

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        loss = nn.functional.mse_loss(model(x), y)
    session.backward(loss)
    session.step()

if distributed.get_rank() == 0:
    print(f"final loss {loss.item():.4f}")
distributed.barrier()
distributed.destroy_process_group()

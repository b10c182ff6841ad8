"""FSDP2 with torch's own mixed precision: fp32 shards, bf16 layers.

Run: torchrun --standalone --nproc-per-node 2 before.py
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
distributed.init_process_group()
mesh = distributed.init_device_mesh(device, (distributed.get_world_size(),))
torch.manual_seed(distributed.get_rank())
inputs = torch.randn(40, 32, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

if distributed.get_rank() == 0:
    print(f"final loss {loss.item():.4f}")
distributed.barrier()
distributed.destroy_process_group()

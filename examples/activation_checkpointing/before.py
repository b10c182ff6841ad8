"""Blocks that are computed again in the backward pass, under torch.amp."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
model = nn.Sequential(block, nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    with autocast(device, dtype):
        hidden = checkpoint(block, x, use_reentrant=False)
        loss = nn.functional.mse_loss(model[1](hidden), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"final loss {loss.item():.4f}")

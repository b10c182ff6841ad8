"""The same with one session."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
model = nn.Sequential(block, nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
session = hs.prepare(model, optimizer, level="O2", dtype=dtype)

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        hidden = checkpoint(block, x, use_reentrant=False)
        loss = nn.functional.mse_loss(model[1](hidden), y)
    session.backward(loss)
    session.step()

print(f"final loss {loss.item():.4f}")

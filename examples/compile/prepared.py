"""The same with one session: it is prepared, then compiled."""

import torch
from torch import nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
backend = "inductor" if device == "cuda" else "aot_eager"  # no C++ compiler needed
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
session = hs.prepare(model, optimizer, level="O2", dtype=dtype)
compiled = torch.compile(model, backend=backend)

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        loss = nn.functional.mse_loss(compiled(x), y)
    session.backward(loss)
    session.step()

print(f"final loss {loss.item():.4f}")

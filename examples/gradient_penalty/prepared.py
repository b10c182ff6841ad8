"""The same with one session: `session.grad` scales, and unscales."""

import torch
from torch import nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
session = hs.prepare(model, optimizer, level="O2", dtype=dtype)

for x, y in zip(inputs, targets, strict=True):
    x.requires_grad_()
    with session.autocast():
        scores = model(x)
        loss = nn.functional.mse_loss(scores, y)
        (slope,) = session.grad(scores.sum(), x)
        loss = loss + 0.01 * slope.square().sum(1).mean()
    session.backward(loss)
    session.step()

print(f"final loss {loss.item():.4f}")

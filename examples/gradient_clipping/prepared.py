"""The same with one session: the norm to clip to is part of it."""

import torch
from torch import nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(60, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
session = hs.prepare(model, optimizer, level="O2", dtype=dtype, clip_grad_norm=1.0)

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        loss = nn.functional.mse_loss(model(x), y)
    session.backward(loss)
    report = session.step()

print(f"gradient norm before clipping {report.grad_norm:.3f}")
print(f"final loss {loss.item():.4f}")

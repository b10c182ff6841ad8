"""A penalty on the gradient of the scores (double backward) under torch.amp."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    x.requires_grad_()
    with autocast(device, dtype):
        scores = model(x)
        loss = nn.functional.mse_loss(scores, y)
    scaled = torch.autograd.grad(scaler.scale(scores.sum()), x, create_graph=True)
    slope = scaled[0] / scaler.get_scale()
    with autocast(device, dtype):
        loss = loss + 0.01 * slope.square().sum(1).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"final loss {loss.item():.4f}")

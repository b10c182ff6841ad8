"""Two models, two losses that use both, two optimizers, one scaler."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
second = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
adam = torch.optim.AdamW(first.parameters(), 3e-3)
sgd = torch.optim.SGD(second.parameters(), 1e-2)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    adam.zero_grad()
    sgd.zero_grad()
    with autocast(device, dtype):
        one, two = first(x), second(x)
        loss = nn.functional.mse_loss(2 * one + 3 * two, y)
        other_loss = nn.functional.mse_loss(3 * one - 5 * two, y)
    scaler.scale(loss).backward(retain_graph=True)
    scaler.scale(other_loss).backward()
    scaler.step(adam)
    scaler.step(sgd)
    scaler.update()

print(f"final loss {(loss + other_loss).item():.4f}")

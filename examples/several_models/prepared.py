"""The same with a session for both models and both optimizers."""

import torch
from torch import nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
second = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
adam = torch.optim.AdamW(first.parameters(), 3e-3)
sgd = torch.optim.SGD(second.parameters(), 1e-2)
session = hs.prepare([first, second], [adam, sgd], level="O2", dtype=dtype)

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        one, two = first(x), second(x)
        loss = nn.functional.mse_loss(2 * one + 3 * two, y)
        other_loss = nn.functional.mse_loss(3 * one - 5 * two, y)
    session.backward(loss + other_loss)
    session.step()

print(f"final loss {(loss + other_loss).item():.4f}")

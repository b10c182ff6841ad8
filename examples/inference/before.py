"""Inference in 16 bits under torch.amp."""

import torch
from torch import nn
from torch.amp import autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device).eval()
with torch.inference_mode(), autocast(device, dtype):
    losses = [
        nn.functional.mse_loss(model(x), y)
        for x, y in zip(inputs, targets, strict=True)
    ]

print(f"final loss {torch.stack(losses).mean().item():.4f}")

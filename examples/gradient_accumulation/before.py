"""An update for four micro-batches, and one for the two that are left."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

WINDOW = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(18, 32, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for epoch in range(5):
    for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        window = min(WINDOW, len(inputs) - number // WINDOW * WINDOW)
        with autocast(device, dtype):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss / window).backward()
        if (number + 1) % WINDOW == 0 or number + 1 == len(inputs):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

print(f"final loss {loss.item():.4f}")

"""A loop with Lightning's Fabric."""

import torch
from lightning.fabric import Fabric
from torch import nn

torch.manual_seed(0)
fabric = Fabric(devices=1, precision="bf16-mixed")
inputs = torch.randn(40, 64, 32, device=fabric.device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(3):
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

print(f"final loss {loss.item():.4f}")

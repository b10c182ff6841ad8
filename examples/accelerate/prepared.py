"""The same on a session: gradients are checked in bf16, too."""

import torch
from halfstep.compat.accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2560, 32)
targets = inputs.sin().sum(-1, keepdim=True) / 4
loader = DataLoader(TensorDataset(inputs, targets), 32)

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
parts = model, optimizer, loader, scheduler
model, optimizer, loader, scheduler = accelerator.prepare(*parts)

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

print(f"final loss {loss.item():.4f}")

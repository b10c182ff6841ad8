"""An exponential moving average of the weights, which is what is evaluated."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(60, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    with autocast(device, dtype):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    average.update_parameters(model)

with torch.no_grad(), autocast(device, dtype):
    loss = nn.functional.mse_loss(average(inputs[0]), targets[0])
print(f"final loss {loss.item():.4f}")

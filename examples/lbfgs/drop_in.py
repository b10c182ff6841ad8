"""The same in fp16: `GradScaler.step` takes the closure."""

import torch
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(256, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
scaler = GradScaler(device)


def closure() -> Tensor:
    optimizer.zero_grad()
    with autocast(device, dtype):
        loss = nn.functional.mse_loss(model(inputs), targets)
    scaler.scale(loss).backward()
    return loss


for _ in range(3):
    loss = scaler.step(optimizer, closure)
    scaler.update()

print(f"final loss {loss.item():.4f}")

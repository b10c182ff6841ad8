"""LBFGS, which evaluates the model inside its step: no closures in torch.amp."""

import torch
from torch import Tensor, nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs = torch.randn(256, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")


def closure() -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for _ in range(3):
    loss = optimizer.step(closure)

print(f"final loss {loss.item():.4f}")

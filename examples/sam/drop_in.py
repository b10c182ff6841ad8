"""The same in fp16: `GradScaler.step` takes the closure."""

import torch
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4


class SAM(torch.optim.Optimizer):
    """Climbs to worse weights nearby, and descends by the gradient there."""

    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base = base

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        climbs = [p.grad * (self.param_groups[0]["rho"] / norm) for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, climbs)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(params, climbs)
        self.base.step()
        return loss


model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
sgd = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
optimizer = SAM(model.parameters(), sgd)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):

    def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
        optimizer.zero_grad()
        with autocast(device, dtype):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        return loss

    loss = scaler.step(optimizer, closure)
    scaler.update()

print(f"final loss {loss.item():.4f}")

"""A custom autograd.Function that needs fp32: its squares overflow fp16."""

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast, custom_bwd, custom_fwd

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4


class SumOfSquares(torch.autograd.Function):
    """The sum of squares of errors, of which fp16 holds no more than 65504."""

    @staticmethod
    @custom_fwd(device_type=device, cast_inputs=torch.float32)
    def forward(ctx, errors: Tensor) -> Tensor:
        ctx.save_for_backward(errors)
        return errors.square().sum()

    @staticmethod
    @custom_bwd(device_type=device)
    def backward(ctx, grad: Tensor) -> Tensor:
        (errors,) = ctx.saved_tensors
        return 2 * grad * errors


model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    with autocast(device, dtype):
        loss = SumOfSquares.apply(300 * (model(x) - y)) / 90000 / len(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"final loss {loss.item():.4f}")

"""A custom autograd.Function that wants 16 bits: a product of its own."""

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast, custom_bwd, custom_fwd

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4


class Product(torch.autograd.Function):
    """x @ weight; it runs in the format of the context that is open."""

    @staticmethod
    @custom_fwd(device_type=device, cast_inputs=dtype)
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    @custom_bwd(device_type=device)
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad.mm(weight.t()), x.t().mm(grad)


model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    with autocast(device, dtype):
        loss = nn.functional.mse_loss(
            Product.apply(model[:2](x), model[2].weight.t()), y
        )
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"final loss {loss.item():.4f}")

"""A whole step, scaler included, captured in a CUDA graph and replayed (GPU only)."""

import sys

import torch
from torch import nn
from torch.amp import GradScaler, autocast

if not torch.cuda.is_available():
    sys.exit("CUDA graphs need a GPU.")
device, dtype = "cuda", torch.float16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3, capturable=True, fused=True)
scaler = GradScaler(device)
x, y = inputs[0].clone(), targets[0].clone()


def step() -> torch.Tensor:
    """Train on what lies in x and y."""
    optimizer.zero_grad(set_to_none=True)
    with autocast(device, dtype, cache_enabled=False):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


side = torch.cuda.Stream()
with torch.cuda.stream(side):  # a warm-up outside of the capture
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()

for new_x, new_y in zip(inputs, targets, strict=True):
    x.copy_(new_x)
    y.copy_(new_y)
    graph.replay()

print(f"final loss {loss.item():.4f}")

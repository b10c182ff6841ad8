"""The net of PyTorch's recipe, timed: large layers, SGD, with one session."""

import time

import torch
from torch import nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
width, steps = (4096, 50) if device == "cuda" else (1024, 10)
inputs = torch.randn(512, width, device=device)
targets = torch.randn(512, width, device=device)

layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
session = hs.prepare(model, optimizer, level="O2", dtype=dtype)


def wait() -> None:
    """Let the device finish."""
    if device == "cuda":
        torch.cuda.synchronize()


start = time.perf_counter()
for number in range(steps + 3):
    if number == 3:  # those before warm up
        wait()
        start = time.perf_counter()
    with session.autocast():
        loss = nn.functional.mse_loss(model(inputs), targets)
    session.backward(loss)
    session.step()
wait()
print(f"{(time.perf_counter() - start) / steps * 1e3:.1f} ms a step")
print(f"final loss {loss.item():.4f}")

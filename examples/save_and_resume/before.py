"""Training that is stopped after one epoch and goes on from a file, under torch.amp.

The second part may switch mixed precision off (`enabled=False`): the state fits.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4
file = Path(tempfile.mkdtemp()) / "state.pt"


def train(num_epochs: int, enabled: bool = True) -> float:
    """Train for one epoch more, or begin, and save; return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = GradScaler(device, enabled=enabled)
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
    for _ in range(num_epochs):
        for x, y in zip(inputs, targets, strict=True):
            optimizer.zero_grad()
            with autocast(device, dtype, enabled=enabled):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "scaler": scaler.state_dict()}, file)
    return loss.item()


at_once = train(2)
file.unlink()
train(1)
resumed = train(1)
print("resumed to the bit:", resumed == at_once)
print(f"resumed without mixed precision: loss {train(1, enabled=False):.4f}")
print(f"final loss {resumed:.4f}")

"""The same with one session: one state holds all, and weights load at any level."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(40, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4
file = Path(tempfile.mkdtemp()) / "state.pt"


def train(num_epochs: int, level: str = "O2", dtype: object = dtype) -> float:
    """Train for one epoch more, or begin, and save; return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    session = hs.prepare(model, optimizer, level=level, dtype=dtype)
    if file.exists():
        session.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(num_epochs):
        for x, y in zip(inputs, targets, strict=True):
            with session.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            session.backward(loss)
            session.step()
    torch.save(session.state_dict(), file)
    return loss.item()


at_once = train(2)
file.unlink()
train(1)
resumed = train(1)
print("resumed to the bit:", resumed == at_once)
print(f"resumed without mixed precision: loss {train(1, 'O0', 'auto'):.4f}")
print(f"final loss {resumed:.4f}")

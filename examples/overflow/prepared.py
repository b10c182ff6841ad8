"""The same with halfstep: the run stops, names the layer, and trains with a rule.

Run: python examples/overflow/prepared.py
"""

import warnings

import torch
from torch import Tensor, nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokens = torch.randint(0, 32, (60, 16, 8), device=device)
warnings.filterwarnings("ignore", "dtype=fp16")  # slow on most CPUs: not the subject


class Block(nn.Module):
    """Predicts each token that it reads, by attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 32)
        with torch.no_grad():  # plants the overflow: fp16 ends at 65504
            self.narrow.weight.mul_(3e5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.narrow(self.wide(h).relu())
        return self.head(self.norm(h))


def prepare(policy: str) -> hs.Session:
    """Return a session that trains a new model."""
    torch.manual_seed(1)
    model = Block().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return hs.prepare(model, optimizer, level="O1", dtype="fp16", policy=policy)


def loss_of(session: hs.Session, x: Tensor) -> Tensor:
    """Return the loss of a batch."""
    with session.autocast():
        logits = session.model(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def train(session: hs.Session) -> None:
    """Make a step with each batch."""
    for step, x in enumerate(tokens):
        loss = loss_of(session, x)
        session.backward(loss)
        session.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"final loss {loss.item():.4f}")


print("1. Train in fp16.")
session = prepare("lean")
try:
    train(session)
except hs.LossScaleCollapse as collapse:
    print("LossScaleCollapse:", collapse)

print("\n2. Ask which operation made the first inf.")
origin = hs.find_nonfinite(session.model, lambda: loss_of(session, tokens[0]))
print(origin)

policy = f"lean + {origin.rule}"
print(f"\n3. Train with policy={policy!r}.")
train(prepare(policy))

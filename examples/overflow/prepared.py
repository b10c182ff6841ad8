"""The same: the run stops with a diagnosis, and goes on with the rule it proposes."""

import copy

import torch
from torch import Tensor, nn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokens = torch.randint(0, 32, (60, 16, 8), device=device)


class Block(nn.Module):
    """Attention, and a feed-forward without a bound, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 32)
        with torch.no_grad():
            self.narrow.weight.mul_(3e5)  # what training sometimes comes to

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.narrow(self.wide(h).relu())
        return self.head(self.norm(h))


def train(model: nn.Module, policy: str) -> float:
    """Return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    session = hs.prepare(model, optimizer, level="O1", dtype="fp16", policy=policy)

    for x in tokens:

        def forward(x: Tensor = x) -> Tensor:
            with session.autocast():
                return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

        loss = forward()
        session.backward(loss)
        try:
            session.step()
        except hs.LossScaleCollapse as collapse:
            print(collapse)
            origin = hs.find_nonfinite(model, forward)
            print(origin)
            return train(copy.deepcopy(fresh), f"lean + {origin.rule}")
    print("trained with", policy)
    return loss.item()


model = Block().to(device)
fresh = copy.deepcopy(model)
print(f"final loss {train(model, 'lean'):.4f}")

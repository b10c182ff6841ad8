"""A transformer whose feed-forward overflows fp16, under torch.amp: it never learns.

Run by halfstep in prepared.py, which says where the inf comes from, and what helps.
"""

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast

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


model = Block().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = GradScaler(device)

for x in tokens:
    optimizer.zero_grad()
    with autocast(device, torch.float16):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"loss scale {scaler.get_scale():g}")
print(f"final loss {loss.item():.4f}")

"""A transformer whose feed-forward overflows fp16, under torch.amp: it never learns.

Its loss is NaN at every step, and the loss scale falls to 6e-14. prepared.py trains the
same model with halfstep: the run stops, names the layer, and then trains with a rule.
"""

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokens = torch.randint(0, 32, (60, 16, 8), device=device)


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

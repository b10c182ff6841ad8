"""An LSTM over sequences of unlike lengths, packed, under torch.amp."""

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast
from torch.nn.utils.rnn import pack_padded_sequence

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(30, 16, 20, 8, device=device)
lengths = torch.randint(5, 21, (30, 16))
targets = inputs[:, :, :5].sum((-1, -2)).tanh()[..., None]


class Reader(nn.Module):
    """An LSTM, and a score of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, length, True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


model = Reader().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scaler = GradScaler(device)

for x, length, y in zip(inputs, lengths, targets, strict=True):
    optimizer.zero_grad()
    with autocast(device, dtype):
        loss = nn.functional.mse_loss(model(x, length), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"final loss {loss.item():.4f}")

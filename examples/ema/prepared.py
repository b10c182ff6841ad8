"""The same with one session: what is averaged are its fp32 weights."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(60, 64, 32, device=device)
targets = inputs.sin().sum(-1, keepdim=True) / 4

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
fp32_model = copy.deepcopy(model)  # before it is prepared
average = AveragedModel(fp32_model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
session = hs.prepare(model, optimizer, level="O2", dtype=dtype)

for x, y in zip(inputs, targets, strict=True):
    with session.autocast():
        loss = nn.functional.mse_loss(model(x), y)
    session.backward(loss)
    session.step()
    fp32_model.load_state_dict(session.weights())
    average.update_parameters(fp32_model)

with torch.no_grad(), session.autocast():
    loss = nn.functional.mse_loss(average(inputs[0]), targets[0])
print(f"final loss {loss.item():.4f}")

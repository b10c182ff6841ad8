"""A GAN: two models, two optimizers that take turns, under torch.amp."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
bce = nn.functional.binary_cross_entropy_with_logits
real_images = torch.randn(60, 64, 16, device=device) * 0.5 + 2
real, fake = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)

generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 1)).to(device)
generator_optimizer = torch.optim.AdamW(generator.parameters(), 1e-3)
critic_optimizer = torch.optim.AdamW(critic.parameters(), 1e-3)
scaler = GradScaler(device)

for images in real_images:
    critic_optimizer.zero_grad()
    with autocast(device, dtype):
        made = generator(torch.randn(64, 8, device=device))
        loss = bce(critic(images), real) + bce(critic(made.detach()), fake)
    scaler.scale(loss).backward()
    scaler.step(critic_optimizer)

    generator_optimizer.zero_grad()
    with autocast(device, dtype):
        generator_loss = bce(critic(made), real)
    scaler.scale(generator_loss).backward()
    scaler.step(generator_optimizer)
    scaler.update()

print(f"final loss {(loss + generator_loss).item():.4f}")

"""The same with a session for each optimizer; each steps by itself.

What is called together runs in the context of the session that steps next.
"""

import torch
from torch import nn

import halfstep as hs

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
of_generator = hs.prepare(generator, generator_optimizer, level="O2", dtype=dtype)
of_critic = hs.prepare(critic, critic_optimizer, level="O2", dtype=dtype)

for images in real_images:
    with of_critic.autocast():
        made = generator(torch.randn(64, 8, device=device))
        loss = bce(critic(images), real) + bce(critic(made.detach()), fake)
    of_critic.backward(loss)
    of_critic.step()

    with of_generator.autocast():
        generator_loss = bce(critic(made), real)
    of_generator.backward(generator_loss)
    of_generator.step()
    of_critic.zero_grad()  # the generator's loss has left gradients there

print(f"final loss {(loss + generator_loss).item():.4f}")

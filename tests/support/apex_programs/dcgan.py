"""A small GAN as programs of apex write one: two optimizers, three losses.

In: a level. Out: the losses of each step.
"""

from __future__ import annotations

import torch
from apex import amp
from torch import Tensor, nn


class Generator(nn.Module):
    """From noise to 8 x 8 pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Compute."""
        out: Tensor = self.main(noise)
        return out


class Discriminator(nn.Module):
    """From pictures to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, 1, 0, bias=False),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Compute."""
        out: Tensor = self.main(pictures)
        return out.view(-1)


def main(opt_level: str = "O1", steps: int = 20) -> list[tuple[float, float, float]]:
    """Train; return the three losses of each step."""
    torch.manual_seed(0)
    net_d, net_g = Discriminator(), Generator()
    criterion = nn.BCEWithLogitsLoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    [net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
        [net_d, net_g],
        [optimizer_d, optimizer_g],
        opt_level=opt_level,
        num_losses=3,
        verbosity=0,
    )
    grid = torch.linspace(-1, 1, 8)
    real = (grid[:, None] * grid[None, :]).expand(16, 1, 8, 8)
    history = []
    for _ in range(steps):
        net_d.zero_grad()
        loss_real = criterion(net_d(real), torch.full((16,), 1.0))
        with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled:
            scaled.backward()
        fake = net_g(torch.randn(16, 4, 1, 1))
        loss_fake = criterion(net_d(fake.detach()), torch.full((16,), 0.0))
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled:
            scaled.backward()
        optimizer_d.step()

        net_g.zero_grad()
        loss_g = criterion(net_d(fake), torch.full((16,), 1.0))
        with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled:
            scaled.backward()
        optimizer_g.step()
        history.append((loss_real.item(), loss_fake.item(), loss_g.item()))
    return history


if __name__ == "__main__":
    main()

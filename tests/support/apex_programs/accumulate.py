"""Micro-batches as programs of apex add them up: with delay_unscale, or without.

In: a level, and whether to delay. Out: the losses of each step, the weights.
"""

from __future__ import annotations

import torch
from apex import amp
from torch import Tensor, nn

MICRO = 4


def main(
    opt_level: str = "O1", delay: bool = True, steps: int = 10
) -> tuple[list[float], list[Tensor]]:
    """Train; return losses, and what the optimizer holds."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, verbosity=0
    )
    draw = torch.Generator().manual_seed(1)
    truth = torch.randn(8, 1, generator=draw)
    history = []
    for _ in range(steps):
        total = 0.0
        for micro in range(MICRO):
            x = torch.randn(16, 8, generator=draw)
            loss = nn.functional.mse_loss(model(x), x @ truth) / MICRO
            last = micro == MICRO - 1
            with amp.scale_loss(
                loss, optimizer, delay_unscale=delay and not last
            ) as scaled_loss:
                scaled_loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        history.append(total)
    return history, [p.detach().float() for p in amp.master_params(optimizer)]


if __name__ == "__main__":
    main()

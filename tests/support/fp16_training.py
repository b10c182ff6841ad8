"""Training in fp16 by a session, and by a `GradScaler` in a loop of one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.scaling import ScaleRule

SGD = torch.optim.SGD


def by_session(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Tensor], Tensor],
    batches: Callable[[int], Tensor],
    steps: int,
    *,
    lr: float = 1e-3,
    level: str = "O1",
    policy: str = "lean",
    **numbers: Any,
) -> int:
    """Train; `numbers` are the scale's. Return how many steps were applied."""
    torch.manual_seed(0)
    model, rule = make(), ScaleRule(**numbers)
    optimizer = SGD(model.parameters(), lr)
    options: Any = {"dtype": "fp16", "policy": policy, "loss_scale": rule}
    session = hs.prepare(model, optimizer, level, **options)
    for step in range(steps):
        with session.autocast():
            loss = loss_of(session.model(batches(step)))
        session.backward(loss)
        session.step()
    return session.steps_applied


def by_scaler(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Tensor], Tensor],
    batches: Callable[[int], Tensor],
    steps: int,
    *,
    lr: float = 1e-3,
    policy: str = "torch",
    **numbers: Any,
) -> int:
    torch.manual_seed(0)
    model, applied = make(), 0
    optimizer = SGD(model.named_parameters(), lr)
    scaler = hs.GradScaler("cpu", **numbers)
    for step in range(steps):
        with hs.autocast("cpu", torch.float16, policy=policy, model=model):
            loss = loss_of(model(batches(step)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        applied += not scaler.last_step.skipped
    return applied

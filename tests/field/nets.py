"""What most programs begin with, and the loop that most of them are."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from tests.field.report import Amp, Program
from torch import Tensor, nn

BATCH, WIDTH = 16, 8


def linear(
    amp: Amp, *, scale: float = 1024.0, lr: float = 0.01, outputs: int = 1
) -> tuple[nn.Linear, torch.optim.SGD, Any]:
    model = nn.Linear(WIDTH, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, amp.scaler(init_scale=scale)


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def mean_square(y: Tensor) -> Tensor:
    """Return a harmless loss."""
    return y.float().square().mean()


def distance(y: Tensor) -> Tensor:
    """Return another, whose gradients are as large in each step."""
    return (y.float() - 1).abs().mean()


def updates_of(optimizer: torch.optim.Optimizer) -> list[int]:
    updates: list[int] = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    return updates


def unchanged(weight: Tensor, least: float = 0.0) -> Callable[[], bool]:
    before = weight.detach().clone()
    return lambda: bool((weight - before).norm() <= least)


def is_nonfinite(tensor: Tensor) -> Callable[[], bool]:
    return lambda: not bool(tensor.isfinite().all())


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, WIDTH), function
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.inner(x)))  # type: ignore[no-any-return]


def loop(
    amp: Amp | None,
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: Any = None,
    *,
    dtype: torch.dtype = torch.float16,
    after_backward: Callable[[], object] = bool,
    after_step: Callable[[], object] = bool,
    **program: Any,
) -> Program:
    """Return the loop of torch's own examples."""

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast(dtype) if amp else nullcontext():
            loss = loss_of()
        (scaler.scale(loss) if scaler else loss).backward()
        after_backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        after_step()

    return Program(model, step, **program)


def training(
    amp: Amp,
    model: nn.Module | None = None,
    *,
    loss_of: Callable[[Tensor], Tensor] = mean_square,
    x: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Program:
    """Return a loop, sick if no step is made or the loss is not finite.

    The model is a linear layer by default.
    """
    model = model or nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = amp.scaler(init_scale=16.0, enabled=dtype == torch.float16)
    updates, losses = updates_of(optimizer), list[Tensor]()
    batch = torch.randn(4, WIDTH) if x is None else x

    def loss() -> Tensor:
        losses.append(loss_of(model(batch)))
        return losses[-1]

    def is_sick() -> bool:
        return not updates or not bool(losses[-1].isfinite())

    return loop(amp, model, loss, optimizer, scaler, dtype=dtype, is_sick=is_sick)


def trained(
    make: Callable[[Callable[[Tensor], Tensor]], nn.Module] | None = None, **more: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Program]]:
    """Make a function `f(tensor, *, cured)` the program that trains with it.

    It is a part of the model that `make` builds, or else the loss of a linear layer;
    `more` goes to `training`.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Program]:
        @functools.wraps(function)
        def build(amp: Amp, *, cured: bool) -> Program:
            own = functools.partial(function, cured=cured)
            if make is None:
                return training(amp, loss_of=own, **more)
            return training(amp, make(own), **more)

        return build

    return decorate


def inference(model: nn.Module, *inputs: object) -> Program:
    """Return a program that runs a model, sick if the result is not finite."""

    def loss() -> Tensor:
        return model(*inputs).float().mean()  # type: ignore[no-any-return]

    return Program(model, loss, lambda: not bool(loss().isfinite()), loss=loss)

"""`amp.scale_loss`: several models, losses and optimizers, and steps left out.

The oracle is the same program in float64 without amp, which leaves out the same steps.
Its numbers have few digits, so that every level must agree to the bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from apex_programs.process import LEVELS
from torch import Tensor, nn

from halfstep.compat.apex import amp
from halfstep.compat.apex.state import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator


class Two(nn.Module):
    def __init__(self, unique: int, *, exact: bool) -> None:
        super().__init__()
        dtypes = [torch.float64] * 2 if exact else [torch.float32, torch.float16]
        self.wide = nn.Parameter(unique + torch.arange(2, dtype=dtypes[0]))
        self.low = nn.Parameter(1 + unique + torch.arange(2, dtype=dtypes[1]))

    def forward(self) -> Tensor:
        kind = self.wide.dtype
        return (self.wide * self.low.to(kind)).sum()


@dataclass(frozen=True)
class Shape:
    optimizers: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of each: the models in it, the optimizers it is scaled for."""

    @property
    def models(self) -> int:
        return sum(map(len, self.optimizers))


SHAPES = {
    "2 models 1 optimizer": Shape(((0, 1),), (((0,), (0,)), ((1,), (0,)))),
    "2 models 2 optimizers": Shape(((0,), (1,)), (((0,), (0,)), ((1,), (1,)))),
    "3 models 1 optimizer": Shape(((0, 1, 2),), (((0, 2), (0,)), ((1, 2), (0,)))),
    "3 models 2 optimizers": Shape(((0,), (1, 2)), (((0, 2), (0, 1)), ((1, 2), (1,)))),
}
RATES = (0.25, 0.5, 0.125)
MOMENTUM = 0.125


@dataclass(frozen=True)
class Plant:
    iteration: int
    loss: int
    model: int
    where: str


def build(shape: Shape, *, exact: bool) -> tuple[list[Two], list[Any]]:
    models = [Two(number + 1, exact=exact) for number in range(shape.models)]
    optimizers: list[Any] = [
        torch.optim.SGD(
            [{"params": models[n].parameters(), "lr": RATES[n]} for n in numbers],
            momentum=MOMENTUM,
        )
        for numbers in shape.optimizers
    ]
    return models, optimizers


def reference(shape: Shape, plant: Plant | None, iterations: int) -> list[list[Tensor]]:
    models, optimizers = build(shape, exact=True)
    for iteration in range(iterations):
        bad = set()
        if plant is not None and plant.iteration == iteration:
            bad = set(shape.losses[plant.loss][1])
        for model in models:
            model.zero_grad()
        for inside, _ in shape.losses:
            loss: Any = sum(models[n]() for n in inside) * 2**iteration
            loss.backward()
        for number, optimizer in enumerate(optimizers):
            if number not in bad:
                optimizer.step()
    return [[p.detach() for p in model.parameters()] for model in models]


def clear(how: str, models: list[Two], optimizers: list[Any]) -> None:
    for each in optimizers if how == "optimizer" else models:
        if how == "none":
            for param in each.parameters():
                param.grad = None
        else:
            each.zero_grad()


def plants(shape: Shape, iterations: int) -> Iterator[Plant]:
    for iteration, loss in itertools.product(range(iterations), range(2)):
        for model, where in itertools.product(shape.losses[loss][0], ("wide", "low")):
            yield Plant(iteration, loss, model, where)


def check(
    shape: Shape, level: str, how: str, own_scalers: bool, plant: Plant | None
) -> None:
    iterations = 2 if plant is None else 3
    models, optimizers = build(shape, exact=False)
    STATE.allow_incoming_model_not_fp32 = True
    amp.initialize(
        models,
        optimizers,
        opt_level=level,
        verbosity=0,
        cast_model_type=False,
        num_losses=2 if own_scalers else 1,
    )
    for scaler, scale in zip(STATE.loss_scalers, (4.0, 16.0), strict=False):
        scaler.set_state(scale, 0)
    for iteration in range(iterations):
        clear(how, models, optimizers)
        for number, (inside, whose) in enumerate(shape.losses):
            loss = sum(models[n]() for n in inside) * 2**iteration
            steppers = [optimizers[n] for n in whose]
            with amp.scale_loss(
                loss, steppers, loss_id=number if own_scalers else 0
            ) as scaled:
                scaled.backward()
                if plant and (plant.iteration, plant.loss) == (iteration, number):
                    getattr(models[plant.model], plant.where).grad[0] = torch.inf
        for optimizer in optimizers:
            optimizer.step()
    expected = reference(shape, plant, iterations)
    masters = [p for o in optimizers for p in amp.master_params(o)]
    held = [p for numbers in shape.optimizers for n in numbers for p in two(models[n])]
    right = [p for numbers in shape.optimizers for n in numbers for p in expected[n]]
    for master, param, value in zip(masters, held, right, strict=True):
        torch.testing.assert_close(master.double(), value, rtol=0, atol=0)
        torch.testing.assert_close(param, master.to(param.dtype), rtol=0, atol=0)


def two(model: Two) -> list[nn.Parameter]:
    return list(model.parameters())


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_skips_what_it_must(shape: str, level: str, *, every: bool) -> None:
    """Law: wherever an inf is, just the optimizers of that loss leave out that step.

    Whichever way gradients are cleared, with one scaler and with two: in turn, or
    each way with each inf.
    """
    ways = list(itertools.product((False, True), ("none", "model", "optimizer")))
    planted = [None, *plants(SHAPES[shape], 3 if every else 2)]
    for number, plant in enumerate(planted):
        for own_scalers, how in ways if every else [ways[number % 6]]:
            check(SHAPES[shape], level, how, own_scalers, plant)


# Groups that are added later


def grow(level: str | None, zero_first: bool, twice: bool, how: str) -> list[Tensor]:
    exact = level is None
    models = [Two(1, exact=exact), Two(2, exact=exact)]
    optimizer: Any = torch.optim.SGD(
        [{"params": models[0].parameters(), "lr": 0.25}], momentum=MOMENTUM
    )
    if level is not None:
        STATE.allow_incoming_model_not_fp32 = True
        amp.initialize(
            models, optimizer, opt_level=level, verbosity=0, cast_model_type=False
        )
        STATE.loss_scalers[0].set_state(4.0, 0)

    def backward(count: int, times: int) -> None:
        for _ in range(times):
            loss: Any = sum(model() for model in models[:count])
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()

    clear(how, models, [optimizer])
    backward(1, 1)
    optimizer.step()
    if zero_first:
        clear(how, models, [optimizer])
    optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.5})
    for _ in range(2):
        clear(how, models, [optimizer])
        backward(2, 2 if twice else 1)
        optimizer.step()
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.parametrize("how", ["none", "model", "optimizer"])
@pytest.mark.parametrize("level", LEVELS)
def test_groups_added_later(level: str, how: str) -> None:
    """Law: a group added after initialize trains as if it had been there."""
    for zero_first, twice in itertools.product((True, False), repeat=2):
        expected = grow(None, zero_first, twice, how)
        found = grow(level, zero_first, twice, how)
        masters = [value.to(kind.dtype) for value, kind in zip(expected, found)]  # noqa: B905
        for value, right in zip(found, masters, strict=True):
            # fp16 without masters rounds its own updates.
            last = 2.0**-10 * float(right.abs().max())
            tolerance = last if value.dtype == torch.float16 else 0
            torch.testing.assert_close(value, right, rtol=0, atol=tolerance)

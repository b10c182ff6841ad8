"""Calls of a `GradScaler` in the wrong order are named in the first iterations."""

import gc
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.scaling.grad_scaler import GradScaler


class Loop:
    """A small fp16 program of torch.amp; a test gives the order of its calls."""

    def __init__(self, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, fused=fused)
        self.scaler = GradScaler("cpu", init_scale=1024.0)

    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.model(torch.randn(4, 8)).float().square().mean()

    def backward(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def penalty(self) -> torch.Tensor:
        scaled, params = self.scaler.scale(self.loss()), [*self.model.parameters()]
        grads = torch.autograd.grad(scaled, params, create_graph=True)
        return torch.stack([grad.square().mean() for grad in grads]).mean()

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)

    def clip_value(self) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)

    def divide(self) -> None:
        """Divide by the number of tokens, which differs from step to step."""
        count = int(torch.randint(900, 1100, ()))
        for param in self.model.parameters():
            param.grad /= count

    def freeze(self) -> None:
        self.model[0].weight.grad[:3] = 0

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def plain_step(self) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def run(loop: Loop, program: str | Callable[[Loop], None]) -> None:
    if callable(program):
        return program(loop)
    for call in program.split():
        getattr(loop, call)()
    return None


def backward_inside(loop: Loop) -> None:
    with torch.autocast("cpu", torch.float16):
        loop.backward()
    loop.finish()


def penalized(loop: Loop) -> None:
    loop.scaler.scale(loop.loss() + loop.penalty()).backward()
    loop.finish()


def made_anew(loop: Loop) -> None:
    loop.scaler = GradScaler("cpu", init_scale=1024.0)
    gc.collect()
    loop.backward()
    loop.finish()


def updated_between(loop: Loop) -> None:
    first, second = (torch.optim.SGD(layer.parameters()) for layer in loop.model[::2])
    loop.backward()
    loop.scaler.step(first)
    loop.scaler.update()
    loop.scaler.step(second)
    loop.scaler.update()
    loop.optimizer.zero_grad()


WRONG: dict[str | Callable[[Loop], None], str] = {
    "backward clip finish": (
        r"multiplied by .* at loss scale 1024, before unscale_. .*first"
    ),
    "backward clip_value finish": (
        "gradients were cut at 0.001 at loss scale 1024, before"
    ),
    "backward clip unscale finish": "call scaler.unscale_.optimizer. first",
    "clear backward plain_step": "scaler was not asked: .*in place of optimizer.step",
    "backward unscale clear finish": "no gradient is left to step with",
    backward_inside: "Leave the context before backward",
    "backward unscale backward finish": "after the last micro-batch",
    penalized: r"no loss after that divides .* scale 1024. .*grads / scaler.get_scale",
    made_anew: "Make one before the loop",
    updated_between: r"update\(\) came between the steps of two optimizers",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_orders(wrong: str | Callable[[Loop], None], fused: bool) -> None:
    """Law: within three iterations one warning says what is wrong, and what to call."""
    loop = Loop(fused)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            run(loop, wrong)
    (text,) = {str(each.message) for each in warned}
    assert re.search(WRONG[wrong], text)


def closure(loop: Loop) -> None:
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)

    def evaluate() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loop.scaler.scale(loss).backward()
        return loss

    loop.scaler.step(loop.optimizer, evaluate)
    loop.scaler.update()


def penalty(loop: Loop) -> None:
    size = loop.penalty() * (10 / loop.scaler.get_scale() ** 2)
    loop.scaler.scale(loop.loss() + size).backward()
    loop.finish()


def penalty_by_itself(loop: Loop) -> None:
    """Scale a penalty that is divided, amid losses without one."""
    size = loop.penalty() / loop.scaler.get_scale() ** 2
    loop.penalty()
    for loss in (loop.loss(), size, loop.loss()):
        loop.scaler.scale(loss).backward()
    loop.finish()


def sharpness(loop: Loop) -> None:
    loop.backward()
    weight = loop.model[0].weight
    direction = weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight.add_(direction, alpha=0.01)
    loop.optimizer.zero_grad()
    loop.backward()
    with torch.no_grad():
        weight.sub_(direction, alpha=0.01)
    loop.finish()


def evaluated(loop: Loop) -> None:
    """Scale a loss that no backward pass follows."""
    loop.backward()
    loop.finish()
    loop.scaler.scale(loop.loss())


RIGHT = (
    "backward backward freeze finish",
    "backward backward divide finish",
    *(closure, sharpness, evaluated, penalty, penalty_by_itself),
)
"""More of them are in tests/field/healthy_loops.py."""


@pytest.mark.parametrize("right", RIGHT)
def test_right_orders(right: str | Callable[[Loop], None]) -> None:
    """Law: nothing is said of programs that are right; warnings are errors here."""
    loop = Loop()
    for _ in range(5):
        run(loop, right)


def test_a_loaded_scale_is_there_before_a_loss() -> None:
    """Law: gradients that were kept are unscaled by a scale that was saved."""
    first, second = Loop(), Loop()
    first.backward()
    first.finish()
    second.scaler.load_state_dict(first.scaler.state_dict())
    (second.loss() * 1024).backward()
    expected = [param.grad / 1024 for param in second.model.parameters()]
    second.scaler.unscale_(second.optimizer)
    pairs = zip(second.model.parameters(), expected, strict=True)
    assert all(param.grad.equal(grad) for param, grad in pairs)
    second.finish()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_outside_the_context(dtype: torch.dtype) -> None:
    """Law: torch's error comes with the cure, and the cure works."""
    loss_of = functional.huber_loss
    layer, scaler = nn.Linear(4, 4), GradScaler("cpu")
    with torch.autocast("cpu", dtype):
        out = layer(torch.ones(2, 4))
    target = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"Found dtype .* but expected .*outside"):
        scaler.scale(loss_of(out, target))
    scaler.scale(loss_of(out.float(), target)).backward()
    assert layer.weight.grad is not None

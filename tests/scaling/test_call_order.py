"""Calls of a `GradScaler` in the wrong order are named in the first iterations."""

from __future__ import annotations

import gc
import pickle
import re
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.scaling.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable


class Loop:
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

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def clipped_by_norm(loop: Loop) -> None:
    loop.backward()
    loop.clip()
    loop.finish()


def clipped_by_value(loop: Loop) -> None:
    loop.backward()
    nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)
    loop.finish()


def clipped_too_early(loop: Loop) -> None:
    loop.backward()
    loop.clip()
    loop.scaler.unscale_(loop.optimizer)
    loop.finish()


def stepped_without_scaler(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()


def dropped(loop: Loop) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.optimizer.zero_grad()
    loop.finish()


def backward_inside(loop: Loop) -> None:
    with torch.autocast("cpu", torch.float16):
        loop.backward()
    loop.finish()


def added_to(loop: Loop) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
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


WRONG: dict[Callable[[Loop], None], str] = {
    clipped_by_norm: r"multiplied by .* at loss scale 1024, before unscale_. .*first",
    clipped_by_value: "gradients were cut at 0.001 at loss scale 1024, before",
    clipped_too_early: "call scaler.unscale_.optimizer. first",
    stepped_without_scaler: "scaler was not asked: .*in place of optimizer.step",
    dropped: "no gradient is left to step with",
    backward_inside: "Leave the context before backward",
    added_to: "after the last micro-batch",
    penalized: r"no loss after that divides .* scale 1024. .*grads / scaler.get_scale",
    made_anew: "Make one before the loop",
    updated_between: r"update\(\) came between the steps of two optimizers",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_orders(wrong: Callable[[Loop], None], fused: bool) -> None:
    """Law: within three iterations one warning says what is wrong, and what to call."""
    loop = Loop(fused)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            wrong(loop)
    texts = {str(each.message) for each in warned}
    assert len(texts) == 1
    assert re.search(WRONG[wrong], texts.pop())


def usual(loop: Loop) -> None:
    loop.backward()
    loop.finish()


def clipped(loop: Loop) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.clip()
    loop.finish()


def accumulated(loop: Loop) -> None:
    """Add up two passes, in which rows of a weight are frozen."""
    loop.backward()
    loop.backward()
    loop.model[0].weight.grad[:3] = 0
    loop.finish()


def divided(loop: Loop) -> None:
    for _ in range(3):
        loop.backward()
    for param in loop.model.parameters():
        param.grad /= 3
    loop.finish()


def divided_by_tokens(loop: Loop) -> None:
    loop.backward()
    for param in loop.model.parameters():
        param.grad /= int(torch.randint(900, 1100, ()))
    loop.finish()


def closure(loop: Loop) -> None:
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)

    def evaluate() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loop.scaler.scale(loss).backward()
        return loss

    loop.scaler.step(loop.optimizer, evaluate)
    loop.scaler.update()


def shared(loop: Loop) -> None:
    first, second = (torch.optim.SGD(layer.parameters()) for layer in loop.model[::2])
    loop.backward()
    loop.scaler.step(first)
    loop.scaler.step(second)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def penalty(loop: Loop) -> None:
    size = loop.penalty() * (10 / loop.scaler.get_scale() ** 2)
    loop.scaler.scale(loop.loss() + size).backward()
    loop.finish()


def penalty_of_torchs_page(loop: Loop) -> None:
    scaled, params = loop.scaler.scale(loop.loss()), [*loop.model.parameters()]
    scaled_grads = torch.autograd.grad(scaled, params, create_graph=True)
    inv_scale = 1.0 / loop.scaler.get_scale()
    grads = [grad * inv_scale for grad in scaled_grads]
    with torch.autocast("cpu", torch.float16):
        size = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    loop.scaler.scale(loop.loss() + size).backward()
    loop.finish()


def penalty_by_itself(loop: Loop) -> None:
    """Scale a penalty that is divided, amid losses without one."""
    size = loop.penalty() / loop.scaler.get_scale() ** 2
    loop.penalty()
    for loss in (loop.loss(), size, loop.loss()):
        loop.scaler.scale(loss).backward()
    loop.finish()


def resumed(loop: Loop) -> None:
    loop.scaler = pickle.loads(pickle.dumps(loop.scaler))  # noqa: S301 -- made here
    usual(loop)


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
    usual(loop)
    loop.scaler.scale(loop.loss())


RIGHT = (
    *(usual, clipped, accumulated, divided, divided_by_tokens),
    *(closure, shared, penalty, sharpness, evaluated, resumed),
)


@pytest.mark.parametrize("right", RIGHT)
def test_right_orders(right: Callable[[Loop], None]) -> None:
    """Law: nothing is said of programs that are right; warnings are errors here."""
    loop = Loop()
    for _ in range(5):
        right(loop)


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

"""What crosses module boundaries, and who made the first inf or NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.diagnostics.preflight.module_ranges import (
    BATCH,
    LOSS,
    Boundaries,
    Trace,
    first_backward,
    first_forward,
)

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.linspace(-1, 1, 8).view(2, 4)
EMPTY = Trace((), ())


class Scaled(torch.autograd.Function):
    """Multiplies gradients by inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute."""
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Overflow."""
        del ctx
        return grads[0] * math.inf


class Bad(nn.Module):
    """Makes inf, forward or backward, and hands on what it is given."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        if self.where == "forward":
            return x / 0
        if self.where == "backward":
            return Scaled.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        return x * 1


class Block(nn.Module):
    """Has code of its own between its modules."""

    def __init__(self, inside: str = "", own: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.bad = Bad(inside)
        self.own = own
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        x = self.bad(self.act(self.first(x)))
        return self.last(Bad.forward(Bad(self.own), x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks, perhaps checkpointed."""

    def __init__(self, inside: str = "", own: str = "", save: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(inside, own))
        self.save = save

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.save else block(x)
        return x


def observed(
    model: nn.Module, x: Tensor = X, loss_fn: Callable[[Tensor], Tensor] = torch.sum
) -> Trace:
    """Return what crossed boundaries in one pass."""
    with Boundaries(model) as boundaries:
        loss = loss_fn(model(x))
        boundaries.end_forward()
        loss.backward()  # type: ignore[no-untyped-call]
    return boundaries.trace()


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(
    ("inside", "own", "place"),
    [("forward", "", "blocks.1.bad"), ("", "forward", "blocks.1"), ("", "", None)],
)
def test_forward(inside: str, own: str, place: str | None, save: bool) -> None:
    """Law: the module is named whose own code made the first inf, not those after."""
    trace = observed(Net(inside, own, save))
    assert first_forward(trace, observed(Net(save=save))) == place
    assert (first_forward(trace, trace)) is None  # the reference has it too


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(
    ("inside", "own", "place"),
    [("backward", "", "blocks.1.bad"), ("", "backward", "blocks.1"), ("", "", None)],
)
def test_backward(inside: str, own: str, place: str | None, save: bool) -> None:
    """Law: the module is named whose backward pass made the first inf."""
    trace = observed(Net(inside, own, save))
    assert first_forward(trace, EMPTY) is None
    assert first_backward(trace, EMPTY) == place
    assert first_backward(trace, trace) is None


def test_before_and_after_the_model() -> None:
    """Law: a bad batch is no module's fault, nor is the gradient of a bad loss."""
    assert first_forward(observed(Net(), X / 0), EMPTY) == BATCH
    trace = observed(Net(), loss_fn=lambda out: Scaled.apply(out).sum())
    assert first_backward(trace, EMPTY) == LOSS


def test_several_takers() -> None:
    """Law: of modules that one tensor goes into, the one around them is named."""

    class Attention(nn.Module):
        """Three take what one gives."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = Bad("backward"), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            """Compute."""
            return self.query(x) + self.key(x)  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(4, 4), Attention())
    assert first_backward(observed(model), EMPTY) == "1"


def test_peaks() -> None:
    """Law: peaks are the largest absolute values, of several calls and outputs too."""
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Identity(), relu)
    trace = observed(model, torch.tensor([[-3.0, 2.0]], requires_grad=True))
    assert trace.peaks() == {"0": 2.0, "1": 2.0, "": 2.0}
    assert trace.gradient_peaks() == {"0": 1.0, "1": 1.0, "": 1.0}
    pair = observed(nn.LSTM(2, 3), torch.ones(1, 1, 2), lambda out: out[0].sum())
    assert 0 < pair.peaks()[""] < 1


def test_nothing_stays() -> None:
    """Law: hooks are gone afterwards, from modules and from tensors that live on."""
    model, x = Net(), X.clone().requires_grad_()
    with Boundaries(model) as boundaries:
        out = model(x)
    before = boundaries.trace()
    out.sum().backward()
    model(x).sum().backward()
    assert boundaries.trace() == before
    assert before.forward
    assert not before.backward

"""Programs that write in place: what capture makes functional computes the same."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

import halfstep as hs
from halfstep.graph.op_times import OpTimes

if TYPE_CHECKING:
    from collections.abc import Callable


class Program(nn.Module):
    """A layer, two buffers, and a function that uses them."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        """Return what the function makes of x; x: (4, 8)."""
        return self.function(self, x)


def count(self: Any, x: Tensor) -> Tensor:
    """Write to buffers."""
    self.count.add_(1)
    self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
    return self.layer(x) * self.count + self.mean


def flat_view(self: Any, x: Tensor) -> Tensor:
    """Write to what a view shares."""
    y = self.layer(x)
    flat = y.view(-1)
    F.relu_(y)
    return flat


def set_items(self: Any, x: Tensor) -> Tensor:
    """Write to parts."""
    y = self.layer(x)
    y[0] = 1.0
    y[:, 1] = x[:, 0]
    y[torch.tensor([1, 2])] = 0.0
    return y


def detached(self: Any, x: Tensor) -> Tensor:
    """Write to what shares memory with what learns."""
    y = self.layer(x)
    shared = y.detach()
    y = y * 2
    shared.add_(1)
    return y


def without_grad(self: Any, x: Tensor) -> Tensor:
    """Write where nothing is recorded."""
    y = self.layer(x)
    with torch.no_grad():
        z = y.clone()
        z.add_(1)
    return y * z


def branch(self: Any, x: Tensor) -> Tensor:
    """Write to results, and to a part of one."""
    out = self.layer(x)
    branch = self.layer(out.relu())
    branch += out
    branch.mul_(2.0)
    viewed = self.layer(torch.relu_(branch))
    viewed[0].add_(1.0)
    return branch + viewed


def both(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor twice."""
    y = self.layer(x)
    return y, y.add_(1)


PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mask": lambda self, x: self.layer(x).masked_fill_(x < 0, -1e4).softmax(-1),
    "broadcast": lambda self, x: self.layer(x).add_(self.layer.bias).mul_(2),
    "integers": lambda self, x: self.layer(x).add_(torch.arange(8)),
    "copy": lambda self, x: self.layer(x).copy_(x) * self.layer.weight[0],
    "power": lambda self, x: self.layer(x).pow_(2),
    "dropout": lambda self, x: F.dropout(self.layer(x), 0.0, inplace=True),
    "scatter": lambda self, x: torch.zeros(4, 8).index_add_(
        0, torch.tensor([0, 1]), self.layer(x)[:2]
    ),
    "fill": lambda self, x: self.layer(x).fill_(3.0) * self.layer(x),
    "transpose": lambda self, x: self.layer(x)[:, :4].t_().relu(),
    "leaky": lambda self, x: F.leaky_relu(self.norm(self.layer(x)), 0.1, inplace=True),
    "of the input": lambda self, x: self.layer(x.clone().zero_().add_(1.0)),
    "bool": lambda self, x: self.layer(x) * (x > 0).logical_or_(x < -1),
    **{each.__name__: each for each in (count, flat_view, set_items, detached)},
    **{each.__name__: each for each in (without_grad, both, branch)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_results(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Law: all in fp32, results, gradients and buffers are the model's to the bit."""
    monkeypatch.setattr(OpTimes, "_time", lambda *_: 1000)
    model, x = Program(PROGRAMS[name]), torch.linspace(-2, 2, 32).view(4, 8)
    reference = copy.deepcopy(model)
    plan = hs.plan(model, [x])
    nodes = tuple(dataclasses.replace(node, low=False) for node in plan.nodes)
    rewritten = hs.rewrite(model, dataclasses.replace(plan, nodes=nodes))
    results = []
    for run in (rewritten, reference):
        out = run(x)
        out = out if isinstance(out, tuple) else (out,)
        torch.stack([each.square().sum() for each in out]).sum().backward()
        results.append(out)
    pairs = [
        *zip(*results, strict=True),
        *zip(model.buffers(), reference.buffers(), strict=True),
        *(
            (p.grad, q.grad)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        ),
    ]
    for own, expected in pairs:
        assert (own is None) == (expected is None)
        assert own is None or own.equal(expected)

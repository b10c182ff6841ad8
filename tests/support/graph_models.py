"""Two layers around what a test of plans is about, and both ways to plan them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs


class Odd(nn.Module):
    """Layers, norms and buffers, around what a test is about."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.batch = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("mask", torch.full((6,), torch.finfo(torch.float32).min))
        self.body = body

    def scores(self, x: Tensor) -> Tensor:
        """Return those of attention without heads."""
        queries, keys = self.a(x), self.b(x)
        return queries @ keys.mT  # type: ignore[no-any-return]

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def planned(
    model: nn.Module, *inputs: Tensor, method: str = "painting", **options: Any
) -> Any:
    return hs.rewrite(model, hs.plan(model, inputs, method=method, **options))


def compiled(
    model: nn.Module, *_: Tensor, method: str = "painting", **options: Any
) -> Any:
    torch._dynamo.reset()
    options |= {"method": method}
    return torch.compile(model, backend="halfstep", options=options)

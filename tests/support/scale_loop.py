"""How a loss scale lives from step to step, without an optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep.scaling import ScaleRule, ScaleState, advance
from halfstep.scaling.strategies import MeasuredStrategy, ScaleStrategy
from halfstep.scaling.unscale import unscale_

RULE = ScaleRule(growth_factor=1.0, min_scale=2.0**-24, max_scale=2.0**60)
CLEAN, BAD = torch.tensor(0.0), torch.tensor(1.0)


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a number is read from a tensor, which waits for the device."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@dataclass
class Loop:
    """A training loop without an optimizer: how a scale lives from step to step."""

    strategy: ScaleStrategy | None
    loss: Callable[[], Tensor]
    parameters: list[Tensor]
    scale: float = 2.0**16
    wishes: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = ScaleState.first(RULE, self.parameters[0].device)
        scale = torch.full_like(state.scale, self.scale)
        self.state = replace(state, scale=scale)

    def begin(self) -> Tensor:
        """Compute a loss and show it; return it scaled."""
        loss = self.loss()
        first = self.strategy and self.strategy.on_loss(loss, self.state)
        if first is not None:
            self.state = replace(self.state, scale=first)
        return loss.float() * self.state.scale

    def end(self) -> Tensor:
        """Unscale, propose, move; return found_inf."""
        gradients = self.gradients()
        found = unscale_(gradients, 1 / self.state.scale)
        self.wish = self.strategy and self.strategy.propose(
            gradients, self.state, found
        )
        self.state = advance(self.state, found, RULE, self.wish)
        return found

    def gradients(self) -> list[Tensor]:
        taken = [p.grad for p in self.parameters if p.grad is not None]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def step(self) -> bool:
        """Run a step; return whether it was lost."""
        self.begin().backward()  # type: ignore[no-untyped-call]
        found = self.end()
        self.wishes.append(None if self.wish is None else self.wish.item())
        return bool(found)


class Block(nn.Module):
    """A linear layer and dropout, perhaps computed again backwards.

    With other random numbers then, so that what disturbs them is seen.
    """

    def __init__(self, checkpointed: bool | None) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3))
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inside(x)  # type: ignore[no-any-return]
        again: Tensor = checkpoint(
            self.inside, x, use_reentrant=self.reentrant, preserve_rng_state=False
        )
        return again


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)),
    "norm": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1)
    ),
    "checkpointed": lambda: nn.Sequential(
        nn.Linear(8, 16), Block(checkpointed=False), nn.Linear(16, 1)
    ),
}


def training(
    net: nn.Module,
    size: float = 1.0,
    own: ScaleStrategy | None = None,
    device: str = "cpu",
    **options: Any,
) -> Loop:
    net.to(device)
    x = torch.randn(4, 8, device=device)

    def loss() -> Tensor:
        with torch.autocast(device, torch.float16):
            out: Tensor = net(x)
        return out.float().square().mean() * size

    return Loop(own or MeasuredStrategy(), loss, [*net.parameters()], **options)


def plain(own: ScaleStrategy, *sizes: float, scale: float = 2.0**16) -> Loop:
    weight = torch.ones(3, requires_grad=True)
    size = chain(sizes, repeat(sizes[-1]))

    def loss() -> Tensor:
        return (weight.half().float() * next(size)).sum()

    return Loop(own, loss, [weight], scale)

"""Sessions over a small network with a normalisation layer, at any level."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import halfstep as hs
from halfstep.session.session import Session

Make = Callable[[Any], torch.optim.Optimizer]


KINDS = ["O0 fp32", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16", "O3 fp16"]
SGD = functools.partial(torch.optim.SGD, lr=0.05)

same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def network(seed: int = 0, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(device)


def build(
    kind: str = "O0 fp32", make: Make = SGD, seed: int = 0, **more: Any
) -> Session:
    """Return a session; `kind` holds level and dtype, and maybe a form of masters."""
    level, dtype, *form = kind.split()
    more |= {"master": form[0]} if form else {}
    model = network(seed, more.pop("device", "cpu"))
    return hs.prepare(model, make(model.parameters()), level, dtype=dtype, **more)


def spoil(session: Session, *names: str, value: float = float("inf")) -> list[Any]:
    """Put `value` into the gradients of parameters from now on; return the hooks."""
    params: dict[str, Any] = dict(session.model.named_parameters())
    row = torch.tensor([2], device=params["0.bias"].device)
    return [
        params[name].register_hook(lambda grad: grad.index_fill(0, row, value))
        for name in names
    ]


def everything(session: Session) -> Any:
    """Return a copy of all that a skipped step must leave alone."""
    stored, optimizer = session.model.state_dict(), session.optimizer.state_dict()
    return copy.deepcopy([stored, session.weights(), optimizer])

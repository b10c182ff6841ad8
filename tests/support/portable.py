"""Sessions of every level and form over one small model with all kinds of weights.

In: a kind, an optimizer. Out: a session, trained or not, and all that it holds.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import halfstep as hs
from halfstep.session.session import Session

# An epsilon that 16 bits can hold, for some forms keep the optimizer's state in them.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
}
KINDS = (
    "O0 fp32 fp32",
    "O1 bf16 fp32",
    "O1 fp16 fp32",
    "O2 bf16 fp32",
    "O2 fp16 fp32",
    "O2 bf16 split",
    "O2 bf16 kahan",
    "O2 bf16 stochastic",
    "O2 bf16 none",
    "O3 bf16 fp32",
)
"""Level, dtype, master."""


class Net(nn.Module):
    """Tied weights, a parametrized one, norms, running means, counters and a mask.

    And, if asked, a parameter that is a number.
    """

    def __init__(self, gain: float | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.middle = parametrizations.weight_norm(nn.Linear(16, 16))
        self.batch = nn.BatchNorm1d(16)
        self.again = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.again.weight
        self.last = nn.Linear(16, 3)
        self.gain: Any = 1.0 if gain is None else nn.Parameter(torch.tensor(gain))
        self.register_buffer("mask", torch.arange(16) % 5 != 0)
        self.register_buffer("shift", torch.linspace(0, 0.3, 16))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.norm(self.first(inputs))))
        hidden = torch.tanh(self.tied(self.again(self.batch(hidden))))
        shifted = hidden * self.gain * self.get_buffer("mask") + self.get_buffer(
            "shift"
        )
        out: Tensor = self.last(shifted.to(hidden.dtype))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def build(kind: str, name: str, seed: int = 0, **more: Any) -> Session:
    level, dtype, master = kind.split()
    model = net(seed)
    optimizer = OPTIMIZERS[name](model.parameters())
    return hs.prepare(model, optimizer, level, dtype=dtype, master=master, **more)


def train(session: Session, *steps: int, factor: float = 1.0) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        with session.autocast():
            out = session.model(inputs)
            loss = nn.functional.mse_loss(out.float(), inputs[:, :3] * inputs[:, 3:])
        session.backward(loss * factor)
        session.step()
        losses.append(loss.item())
    return losses


def bits(session: Session) -> dict[str, Any]:
    return {
        "state": session.state_dict(),
        "stored": dict(session.model.state_dict()),
        "optimizer": session.optimizer.state_dict(),
    }

"""A user's own normalisation: known by its name, or kept exact by a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.casting.convert_model import convert_
from halfstep.policy import Policy, levels

BF16, FP32 = torch.bfloat16, torch.float32
INPUTS = torch.linspace(-1, 1, 48).view(8, 6).sin()


class MyNorm(nn.Module):
    """A user's normalisation, whose name does not tell; it writes into its buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; a mix of dtypes would be refused."""
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.addcmul(x - self.mean, x, self.weight)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_norms_by_rule(level: str) -> None:
    """Law: 'type:MyNorm=fp32' keeps a user's norm exact, buffers and all."""
    model = nn.Sequential(nn.Linear(6, 6), MyNorm(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = "lean + type:MyNorm=fp32"
    session = hs.prepare(model, optimizer, level, dtype="bf16", policy=policy)
    stored = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    low = dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), BF16)
    assert stored == low | {"1.weight": FP32, "1.mean": FP32}
    losses = []
    for _ in range(6):
        with session.autocast():
            loss = model(INPUTS).square().mean()
        session.backward(loss)
        assert session.step().applied
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model[1].mean.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("LlamaRMSNorm", True),
        ("T5LayerNorm", True),
        ("MyGroupNorm", True),
        ("LayerNormalizer", False),
        ("WeightNorm", False),
    ],
)
def test_norms_by_name(name: str, spared: bool) -> None:
    """Law: at O2 the end of a class's name tells a norm; at O3 it does not matter."""
    made: Any = type(name, (nn.Module,), {})
    for level in ("O2", "O3"):
        module = made()
        module.weight = nn.Parameter(torch.ones(3))
        model = nn.Sequential(module)
        convert_(model, levels.parse(level), BF16, Policy(base="lean"))
        assert module.weight.dtype == (FP32 if spared and level == "O2" else BF16)

"""Weights that are computed from others: parametrizations, old and new."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import halfstep as hs
from halfstep.casting.convert_model import convert_
from halfstep.policy import Policy, levels

BF16, FP32 = torch.bfloat16, torch.float32
LOW = pytest.mark.parametrize("level", ["O2", "O3"])


class Symmetric(nn.Module):
    """A user's own parametrization; notes what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return x.triu() + x.triu(1).T


NEW: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(
        layer, "weight", Symmetric()
    ),
    "two": lambda layer: (
        parametrizations.spectral_norm(layer),
        parametrize.register_parametrization(layer, "weight", Symmetric()),
    ),
}
OLD: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def network(change: Callable[[nn.Module], object]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    change(model[0])
    return model


def train(model: nn.Module, level: str, dtype: str, base: str) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session = hs.prepare(
        model, optimizer, level, dtype=dtype, policy=base, loss_scale=2.0**4
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 6, generator=generator)
    losses = []
    for _ in range(12):
        with session.autocast():
            loss = (model(inputs) - inputs[:, :3]).square().mean()
        session.backward(loss)
        assert session.step().applied
        losses.append(loss.item())
    return session, losses


WAYS = [("bf16", "lean", "O2"), ("fp16", "torch", "O3"), ("bf16", "torch", "O3")]
"""Format, base of the policy, level."""


def in_turn(kinds: Any) -> Any:
    """Return all kinds, each with one of the ways."""
    given = [(kind, *WAYS[number % 3]) for number, kind in enumerate(kinds)]
    return pytest.mark.parametrize(("kind", "dtype", "base", "level"), given)


@in_turn(NEW)
def test_training(kind: str, dtype: str, base: str, level: str) -> None:
    """Law: trained low, the loss falls as in fp32; the weight a layer sees is low.

    A parametrization gets fp32 and runs without autocast.
    """
    model = network(NEW[kind])
    session, losses = train(model, level, dtype, base)
    _, exact = train(network(NEW[kind]), "O0", "fp32", "torch")
    low = session.choice.format.dtype
    layer: Any = model[0]
    with session.autocast():
        assert layer.weight.dtype == low
    held = layer.parametrizations.weight
    assert {p.dtype for p in (*held.parameters(), *held.buffers())} == {FP32}
    assert layer.bias.dtype == model[2].weight.dtype == low
    assert losses[-1] < losses[0]
    # Relative: each of a dozen steps adds roundings of a few ulps, 2**-7 each in bf16.
    torch.testing.assert_close(losses, exact, rtol=2.0**-4, atol=0)
    assert "type:ParametrizationList=fp32" in str(session.policy)
    assert session.explain().rows
    if kind == "own":
        assert set(held[0].seen[1:]) == {(FP32, False)}


@pytest.mark.parametrize("kind", ["orthogonal", "weight_norm"])
@LOW
def test_the_weight_is_rounded_once(kind: str, level: str) -> None:
    """Law: a computed weight is the fp32 one, rounded, in regions and outside."""
    model, twin = network(NEW[kind]), network(NEW[kind])
    convert_(model, levels.parse(level), BF16, Policy(base="lean"))
    layer, exact = model[0], twin[0]
    outside = layer.weight
    with torch.autocast("cpu", BF16):
        inside = layer.weight
    assert torch.equal(outside, exact.weight.to(BF16))
    assert torch.equal(inside, outside)


@LOW
def test_an_island_keeps_its_weight_exact(level: str) -> None:
    """Law: in a module that a rule keeps in fp32 the computed weight is fp32 too."""
    model, twin = network(NEW["orthogonal"]), network(NEW["orthogonal"])
    rules = Policy.parse("lean + module:0=fp32")
    converted = convert_(model, levels.parse(level), BF16, rules)
    assert converted.fp32_modules == ("0", "0.parametrizations.weight")
    assert torch.equal(model[0].weight, twin[0].weight)
    assert model[2].weight.dtype == BF16


@LOW
@pytest.mark.filterwarnings("ignore:the copy of the model holds")
def test_identity_and_copies(level: str) -> None:
    """Law: names and identity of the parameters survive, and a copy computes alike."""
    model = network(NEW["weight_norm"])
    before = dict(model.named_parameters())
    session, _ = train(model, level, "bf16", "lean")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)
    twin, inputs = copy.deepcopy(model), torch.randn(2, 6)
    with session.autocast():
        assert torch.equal(twin(inputs), model(inputs))
    with session.autocast(), parametrize.cached():
        cached = model(inputs)
        assert torch.equal(model(inputs), cached)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@in_turn(OLD)
def test_the_old_forms(kind: str, dtype: str, base: str, level: str) -> None:
    """Law: weights that a hook computes before each call train low as in fp32."""
    _, losses = train(network(OLD[kind]), level, dtype, base)
    _, exact = train(network(OLD[kind]), "O0", "fp32", "torch")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, exact, rtol=2.0**-4, atol=0)

"""An eps that 16 bits do not hold is named, and only where it ruins weights."""

import itertools
import math

import pytest
import torch
from required import required
from torch import Tensor, nn, optim

import halfstep as hs
from halfstep.nonfinite.optimizer_eps import eps_underflows

FP16 = torch.float16
OPTIMIZERS = (
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Adamax, optim.Adadelta, optim.Adagrad),
)
CASES = list(itertools.product(OPTIMIZERS, (1e-8, 1e-7, 6.1e-5)))
CASES.remove((optim.Adagrad, 1e-7))  # it depends on the gradients


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(64, 1)).half()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    y = x[:, :8].sum(1, keepdim=True).sin()
    return nn.functional.mse_loss(model(x.half()).float(), y)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("make", "eps"), CASES)
def test_it_is_named_where_training_breaks(
    make: type[optim.Optimizer], eps: float
) -> None:
    """Law: training blows up, or ends in NaN, exactly where it is named."""
    model = network()
    optimizer = make(model.parameters(), lr=1e-3, eps=eps)
    named = eps_underflows(optimizer)
    losses = train(model, optimizer, 20)
    breaks = not math.isfinite(sum(losses)) or max(losses) > 10 * losses[0]
    assert breaks == bool(named)
    if named:
        assert make.__name__ in str(named[0])
        assert named[0].is_zero == (eps < 2.0**-25)


def test_what_divides_in_fp32_is_not_named() -> None:
    """Law: fused kernels, wider ranges and other libraries' are left out."""
    model, wide = network(), network().float()
    assert not eps_underflows(optim.AdamW(model.parameters(), fused=True))
    assert not eps_underflows(optim.AdamW(wide.parameters()))
    assert not eps_underflows(optim.AdamW(network().bfloat16().parameters()))
    assert eps_underflows(optim.AdamW(wide.parameters()), FP16)

    class Own(optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {"eps": 1e-8})

    assert not eps_underflows(Own())


def test_groups_are_told_apart() -> None:
    """Law: the group whose eps is too small is named, and no other."""
    model = network()
    first, second = (list(model[index].parameters()) for index in (0, 2))
    fine = {"params": first, "eps": 1e-3}
    (underflow,) = eps_underflows(optim.Adam([fine, {"params": second}]))
    assert (underflow.group, underflow.eps, underflow.dtype) == (1, 1e-8, FP16)
    assert str(underflow) == (
        "Adam updates group 1 in float16, where its eps=1e-08 is 0, and 0 / 0 is NaN"
    )


@pytest.mark.parametrize("make", [optim.Adam, optim.Adagrad])
def test_a_replay_finds_the_optimizer(make: type[optim.Optimizer]) -> None:
    """Law: the optimizer that made NaN of a weight is told, and the cure works."""
    model = network()
    optimizer = make(model.parameters(), lr=1e-3, eps=1e-8)
    train(model, optimizer, 3)
    bad = required(hs.find_nonfinite(model, lambda: loss_of(model, 0)))
    assert bad.cause == "weight"
    assert bad.advice.startswith(f"{make.__name__} updates group 0 in float16, where")
    assert "use eps=6.1e-05, or master weights" in bad.advice
    cured = network()
    train(cured, make(cured.parameters(), lr=1e-3, eps=6.1e-5), 3)
    assert not hs.find_nonfinite(cured, lambda: loss_of(cured, 0))


def test_another_optimizer_is_not_blamed() -> None:
    """Law: where one without an eps made NaN, none is spoken of."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=6e4, momentum=0.9)
    train(model, optimizer, 4)
    bad = required(hs.find_nonfinite(model, lambda: loss_of(model, 0)))
    assert bad.cause == "weight"
    assert "eps" not in bad.advice

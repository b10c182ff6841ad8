"""A check before training leaves everything alone, and says what it cannot check."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from checked_nets import LOUD, Net, batch, loss
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import UserError


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that a check might change, as plain values and copies."""
    tensors = {
        name: (id(one), one.data_ptr(), one.clone(), one.grad, one.dtype)
        for name, one in [*model.named_parameters(), *model.named_buffers()]
    }
    grads = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training, type(m))
        for m in model.modules()
    ]
    leaves = [p._backward_hooks for p in model.parameters()]
    legacy = np.random.get_state()[1]  # noqa: NPY002 -- what users still draw from
    generators = torch.get_rng_state(), random.getstate(), legacy
    held = copy.deepcopy(optimizer.state_dict())
    return [tensors, grads, hooks, leaves, generators, held]


def same(one: Any, other: Any) -> bool:
    """Say whether two nested values are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_arguments_are_refused() -> None:
    """Law: no module, one of torch's losses, another's optimizer: each is named."""
    model, other = Net(), torch.optim.SGD(Net().parameters())
    with pytest.raises(
        UserError, match=r"^model is of type function; it must be a torch"
    ):
        hs.check(batch, loss, batch())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"CrossEntropyLoss\(\) takes no model"):
        hs.check(model, nn.CrossEntropyLoss(), batch())
    with pytest.raises(UserError, match="SGD holds no parameter of the model"):
        hs.check(model, loss, batch(), optimizer=other)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("gain", [1.0, LOUD])
def test_nothing_changes(level: str, gain: float) -> None:
    """Law: weights, gradients, buffers, state, hooks and generators stay to the bit."""
    model = Net(gain)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    before = state_of(model, optimizer)
    for dtype in ("bf16", "fp16"):
        hs.check(
            model, loss, batch(), level=level, dtype=dtype, optimizer=optimizer, steps=1
        )
    assert same(before, state_of(model, optimizer))


def refusal(model: nn.Module, loss_fn: Any = loss, given: Any = None) -> str:
    """Return the words of a refusal, which are one line."""
    with pytest.raises(UserError) as caught:
        hs.check(model, loss_fn, given or batch(), level="O2", dtype="bf16", steps=0)
    words = str(caught.value)
    assert "\n" not in words
    assert len(words.split()) <= 35
    return words


def test_losses_that_are_none() -> None:
    """Law: a loss that cannot be trained with is refused, with what would be right."""
    model = Net()
    assert refusal(model, lambda m, b: m(b[0])) == (
        "loss_fn returned a tensor of shape (32, 8) and torch.float32: return the "
        "loss, one floating-point number, such as loss_fn(model(x), y).mean()."
    )
    assert refusal(model, lambda m, b: loss(m, b).detach()) == (
        "loss_fn returned a loss without a graph, so that there are no gradients: "
        "compute it from the model's output, without detach(), item() or "
        "torch.no_grad()."
    )
    assert refusal(model, lambda m, b: loss(m, b).item()) == (
        "loss_fn returned a float: return the loss, one floating-point number, such as "
        "loss_fn(model(x), y).mean()."
    )
    before = state_of(model, torch.optim.SGD(model.parameters()))
    assert refusal(model, lambda _, b: loss(model, b)) == (
        "loss_fn uses the model that was given to check, not the copy it is called "
        "with: write loss_fn(model, batch) with its own argument."
    )
    assert same(before, state_of(model, torch.optim.SGD(model.parameters())))
    constant = torch.ones((), requires_grad=True)
    assert "no gradient reaches" in refusal(model, lambda _m, _b: constant * 2)


def test_a_batch_elsewhere() -> None:
    """Law: a batch on another device is named, with how to move it."""
    x, y = batch()
    assert refusal(Net(), given=(x.to("meta"), y)) == (
        "the batch holds a tensor on meta, the model is on cpu: move it, as in "
        "batch.to('cpu')."
    )
    # Where it is on the right one, what the model raises is named, and kept as cause.
    with pytest.raises(UserError, match="cannot be multiplied") as caught:
        hs.check(Net(), loss, (x[:, :3], y), level="O2", dtype="bf16", steps=0)
    assert type(caught.value.__cause__) is RuntimeError


class Owner(nn.Linear):
    """Holds what cannot be copied."""

    def __deepcopy__(self, memo: object) -> Owner:
        message = "it holds a file"
        raise TypeError(message)


def test_models_that_cannot_be_checked() -> None:
    """Law: models of which no fp32 copy can be made are refused."""
    assert refusal(Owner(16, 8)) == (
        "Owner cannot be copied, and check works on copies: it holds a file"
    )
    assert refusal(Net().bfloat16()) == (
        "parameter 'inner.0.weight' is stored in torch.bfloat16: check compares with "
        "fp32, and needs the fp32 weights; load the model in fp32."
    )
    assert refusal(Net().requires_grad_(requires_grad=False)) == (
        "Net has no parameter that learns: there is nothing to check."
    )
    assert refusal(nn.DataParallel(Net())) == (
        "check(model=...) got a DataParallel: give the bare model, model.module."
    )
    assert refusal(nn.LazyLinear(8)) == (
        "'weight' of the model has no shape yet, as its module is lazy and has not "
        "run: call the model once first."
    )
    with torch.device("meta"):
        empty = nn.Linear(16, 8)
    assert refusal(empty) == (
        "'weight' is on the meta device: check needs a whole model."
    )


def test_evaluation_mode_is_noted() -> None:
    """Law: a model that is not in training mode is checked as it is, and said to be."""
    model = Net().eval()
    report = hs.check(model, loss, batch(), level="O1", dtype="bf16", steps=0)
    assert "evaluation mode" in str(report.findings[0])
    assert report.findings[0].severity == "note"
    assert report.verdict == "good"
    assert not model.training


def test_a_batch_that_cannot_be_halved() -> None:
    """Law: without a yardstick the check goes on, and says so."""
    model = nn.Linear(16, 8)
    one = batch(1)
    report = hs.check(model, loss, one, level="O1", dtype="bf16", steps=0)
    assert report.facts.noise is None
    assert "cannot be halved" in str(report.findings[0])
    two = hs.check(Net(), loss, batch(2), level="O1", dtype="bf16", steps=0)
    assert two.facts.noise is None
    assert "half the batch does not run" in str(two.findings[0])


def test_compiled_models_are_checked_eager() -> None:
    """Law: what torch.compile has wrapped is checked without it, and said to be."""
    model = torch.compile(Net(), backend="eager")
    report = hs.check(model, loss, batch(), level="O1", dtype="bf16", steps=0)  # type: ignore[arg-type]
    assert report.verdict == "good"
    assert "torch.compile" in str(report.findings[0])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: a healthy network is good on a GPU, whose generator stays as it was."""
    model = Net().cuda()
    given = tuple(one.cuda() for one in batch())
    before = torch.cuda.get_rng_state()
    for dtype in ("bf16", "fp16"):
        report = hs.check(model, loss, given, level="O2", dtype=dtype, steps=0)
        assert report.verdict == "good"
        assert report.facts.dropout_off
    assert torch.equal(torch.cuda.get_rng_state(), before)

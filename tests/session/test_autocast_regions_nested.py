"""What a session keeps from region to region, refuses, and tells."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
import torch
from session_cases import any_machine  # noqa: F401
from torch import Tensor, nn

import halfstep as hs
from halfstep.casting import weight_cache

BF16 = torch.bfloat16
LOOPS = runpy.run_path(str(Path(__file__).with_name("test_autocast_regions.py")))
"""A session, torch's loop, and programs for both."""
Ours, Torchs = LOOPS["Ours"], LOOPS["Torchs"]
SGD, batch, exact = LOOPS["SGD"], LOOPS["batch"], LOOPS["exact"]
loss_of, one_loss = LOOPS["loss_of"], LOOPS["one_loss"]


def test_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: casts and gradients lie where they lay in the step before.

    Those of small weights do not: for them autograd is quicker.
    """
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    loop = Ours(BF16, SGD, 2)
    layers = loop.net.once, loop.net.twice
    params = [param for layer in layers for param in layer.parameters()]
    places = set()
    for step in range(3):
        for number in range(2):
            with loop.region():
                loss = loss_of(loop, 10 * step + number)
            loop.backward(loss)
            grads = [p.grad.data_ptr() for p in params if p.grad is not None]
            loop.step()
        entries = loop.session._contexts.cache._entries.values()
        places.add((*grads, *(entry.data.data_ptr() for entry in entries)))
    assert len(places) == 1


def test_kept_gradients_stay() -> None:
    """Law: a gradient that a program keeps over a step is not written over."""
    loop, kept = Ours(BF16, SGD, 1), []
    for step in range(3):
        with loop.region():
            loss = loss_of(loop, step)
        loop.backward(loss)
        grad = loop.net.twice.weight.grad
        assert grad is not None
        kept.append((grad, grad.clone()))
        loop.step()
    for grad, value in kept:
        assert torch.equal(grad, value)


def test_other_backward_passes_are_left_alone() -> None:
    """Law: `torch.autograd.grad` beside the session gives gradients, and no `.grad`."""
    loops = Ours(BF16, SGD, 1), Torchs(BF16, SGD, 1)
    found = []
    for loop in loops:
        with loop.region():
            loss = loss_of(loop, 0)
        weights = loop.net.once.weight, loop.net.twice.weight
        grads = torch.autograd.grad(loss, weights, retain_graph=True)
        assert loop.net.once.weight.grad is None
        loop.backward(loss)
        found.append([*grads, loop.net.once.weight.grad, loop.net.twice.weight.grad])
    exact(found[0], found[1])


def test_unmatched_rules_are_told_of_once() -> None:
    """Law: at the end of the first step, with their words; those implied are not."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.RMSNorm(4))
    rules = "torch + op:softmax=fp32 + module:1=fp32 + op:linear=low + op:exp=fp32"
    session = hs.prepare(
        net, SGD(net.parameters()), "O2", dtype="bf16", policy=rules, accumulate=2
    )
    assert str(session.policy).endswith(" + type:RMSNorm=fp32")
    told = []
    for _ in range(6):
        with session.autocast():
            loss = net[1](net[0](torch.ones(2, 4))).float().sum()
        session.backward(loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session.step()
        told.append([(str(w.message), w.filename) for w in caught])
    text = (
        "policy rule 'op:softmax=fp32', 'op:exp=fp32' matched nothing: no such "
        "operation or module ran in the region. An operation inside another, as addmm "
        "in linear, follows the outer."
    )
    assert told == [[], [(text, __file__)], [], [], [], []]


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_other_levels_have_no_casts(level: str) -> None:
    """Law: where weights are not fp32, or autocast is off, nothing is kept."""
    net = nn.Sequential(nn.Linear(6, 6))
    session = hs.prepare(
        net, SGD(net.parameters()), level, dtype="auto" if level == "O0" else "bf16"
    )
    for seed in range(2):
        with session.autocast():
            assert torch.is_autocast_enabled("cpu") == (level == "O2")
            loss = nn.functional.mse_loss(net(batch(seed)[0]).float(), batch(seed)[1])
        session.backward(loss)
        session.step()
    assert len(session._contexts.cache) == 0


def test_a_region_is_left_by_an_error() -> None:
    """Law: an error in a region leaves no region open, and the session goes on."""
    loop = Ours(BF16, SGD, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"), loop.region():
            loop.net(torch.ones(2, 5))
        assert not torch.is_autocast_enabled("cpu")
        one_loss(loop, 0)


def test_a_failed_backward_pass_takes_nothing_in_later() -> None:
    """Law: after an error in a backward pass, one beside the session is not folded."""

    def fail(_: Tensor) -> None:
        message = "inside"
        raise ValueError(message)

    loop = Ours(BF16, SGD, 1)
    with loop.region():
        loss = loss_of(loop, 0)
    handle = loop.net.norm.weight.register_hook(fail)
    with pytest.raises(ValueError, match="inside"):
        loop.backward(loss)
    handle.remove()
    loop.net.zero_grad()
    with loop.region():
        loss = loss_of(loop, 0)
    weight = loop.net.once.weight
    (grad,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    assert weight.grad is None
    loop.backward(loss)
    exact(weight.grad, grad)

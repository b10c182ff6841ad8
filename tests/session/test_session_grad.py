"""`session.grad`: true gradients with their graph, for gradient penalties."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from session_cases import same
from torch import Tensor, nn

import halfstep as hs
from halfstep.session.session import Session

LOW = ["O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16"]
LAYERS = 8


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten()),
        *(nn.Linear(128, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)),
    )


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 4, 4, generator=generator).requires_grad_()


def build(kind: str, model: nn.Module | None = None, **more: Any) -> Session:
    level, dtype = kind.split()
    model = critic() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return hs.prepare(model, optimizer, level, dtype=dtype, **more)


def penalty(slope: Tensor) -> Tensor:
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    ours, theirs = (
        torch.cat([one.detach().flatten() for one in tensors])
        for tensors in (found, right)
    )
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kind", ["O0 fp32", *LOW])
@pytest.mark.parametrize("policy", ["lean", "torch"])
def test_second_order_gradients(kind: str, policy: str) -> None:
    """Law: as torch's in fp32, up to a rounding or two of each layer."""
    truth, x = critic(), images()
    (right,) = torch.autograd.grad(truth(x).sum(), x, create_graph=True)
    penalty(right).backward()
    trained = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    session = build(kind, policy=policy)
    with session.autocast():
        out = session.model(x)
    (slope,) = session.grad(out, x, torch.ones_like(out))
    session.backward(penalty(slope))
    found = dict(session.grads())
    mantissa = {"fp32": 23, "fp16": 10, "bf16": 7}[kind.split()[1]]
    bound = 2 * LAYERS * 2.0 ** -(mantissa + 1)
    assert slope.dtype == torch.float32
    assert found.keys() == trained.keys()
    assert error([slope], [right]) <= bound
    assert error([*found.values()], [trained[name] for name in found]) <= bound
    assert session.step().applied


@pytest.mark.parametrize("kind", LOW)
def test_the_context_makes_no_difference(kind: str) -> None:
    """Law: inside of the autocast context the same bits come out."""
    session, x = build(kind), images()
    with session.autocast():
        out = session.model(x).sum()
        (inside,) = session.grad(out, x)
    (after,) = session.grad(out, x)
    same(inside, after)


@pytest.mark.parametrize("kind", ["O1 fp16", "O2 fp16"])
def test_small_gradients_are_kept(kind: str) -> None:
    """Law: what fp16 holds as zero is there."""
    session, x = build(kind), images()
    with session.autocast():
        out = session.model(x).float().sum() * 2.0**-24
    (lost,) = torch.autograd.grad(out, x, retain_graph=True)
    (slope,) = session.grad(out, x)
    (right,) = torch.autograd.grad(critic()(x).sum() * 2.0**-24, x)
    assert not bool(lost.any())
    assert error([slope], [right]) < 0.1


def test_an_overflow_is_skipped() -> None:
    """Law: an inf in the first pass skips the step, and the next one is taken."""
    session, x = build("O1 fp16"), images()
    skipped = []
    for factor in (1e6, 1.0):
        with session.autocast():
            out = session.model(x).float().sum() * factor
        (slope,) = session.grad(out, x)
        session.backward(penalty(slope))
        skipped.append(session.step().skipped)
    assert skipped == [True, False]


def test_arguments_are_those_of_torch() -> None:
    """Law: several outputs and inputs, unused ones, and no graph, as in torch."""
    session, x, other = build("O2 fp16"), images(), torch.ones(1, requires_grad=True)
    weight = session.model[0].weight
    with session.autocast():
        outs = [session.model(x).sum() for _ in range(2)]
    first, none, last = session.grad(outs, [x, other, weight], allow_unused=True)
    assert none is None
    assert (first.shape, last.shape) == (x.shape, weight.shape)
    assert (weight.dtype, last.dtype) == (torch.float16, torch.float32)
    (alone,) = session.grad(outs[0], x, create_graph=False)
    assert not alone.requires_grad
    assert error([2 * alone], [first]) < 2.0**-8
    with pytest.raises(RuntimeError, match="a second time"):
        session.grad(outs[0], x)
    with pytest.raises(RuntimeError, match="not have been used"):
        session.grad(outs[1], other)

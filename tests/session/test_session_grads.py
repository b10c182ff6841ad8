"""`Session.grads`: the unscaled gradients of a step; reading changes nothing."""

import copy
from typing import Any

import pytest
import torch
from processes import group_of_one
from session_cases import KINDS
from small_training import same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep import Session
from halfstep.errors import UserError

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_grad_norm": 1e-3},
    "accumulated": {"accumulate": 3},
}


READ = [("plain", 1), ("clipped", 2), ("accumulated", 2)]
"""Options, and the number of losses of a micro-batch."""


class Net(nn.Module):
    """Has a parameter without gradient, and, if asked, one with sparse gradients."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(8, 6, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.rows(x)).float()
        return out.pow(2).mean()


def build(kind: str, **options: Any) -> Session:
    level, dtype = kind.split()
    model = Net(sparse=dtype != "fp16")  # torch adds no sparse tensors in fp16
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scale = 1024.0 if dtype == "fp16" else "auto"
    return hs.prepare(model, optimizer, level, dtype=dtype, loss_scale=scale, **options)


def backward(session: Session, seed: int, losses: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(8, (4,), generator=draw)
    for _ in range(losses):
        with session.autocast():
            loss = session.model(x)
        session.backward(loss)


def read(session: Session) -> dict[str, Tensor]:
    session.grad_norm()
    return {name: grad.to_dense().clone() for name, grad in session.grads()}


def test_losses_of_one_forward_pass() -> None:
    """Law: while the graph is kept, another loss adds its gradients."""
    session = build("O1 fp16")
    with session.autocast():
        loss = session.model(torch.arange(4))
    session.backward(loss, retain_graph=True)
    session.backward(loss)
    once, twice = build("O1 fp16"), read(session)
    with once.autocast():
        loss = once.model(torch.arange(4))
    once.backward(2 * loss)
    for key, grad in read(once).items():
        # Doubling is exact, but for numbers below 2^-14 before the scale is taken out.
        torch.testing.assert_close(twice[key], grad, rtol=0, atol=2**-24)


def test_a_graph_kept_under_ddp() -> None:
    """Law: it is refused, since DDP would average the first loss alone."""
    with group_of_one():
        session = build("O1 bf16")
        session.model = DistributedDataParallel(session.model)
        with session.autocast():
            loss = session.model(torch.arange(4))
        with pytest.raises(UserError, match="retain_graph=True: DDP averages"):
            session.backward(loss, retain_graph=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "losses"), READ)
@pytest.mark.parametrize("kind", KINDS)
def test_reading_changes_nothing(kind: str, name: str, losses: int) -> None:
    """Law: the bits of the steps, their reports and states, are those without it."""
    sessions = [build(kind, **OPTIONS[name]) for _ in range(2)]
    for step in range(2):
        for micro in range(sessions[0].accumulate):
            for session in sessions:
                backward(session, 10 * step + micro, losses)
                if session is sessions[0] and micro + 1 == session.accumulate:
                    for _, grad in session.grads():
                        grad.mul_(0)
                report = session.step()
        assert report.applied
    states = [copy.deepcopy(session.state_dict()) for session in sessions]
    assert same(*states)


@pytest.mark.parametrize("options", ["plain", "accumulated"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_is_applied(kind: str, options: str) -> None:
    """Law: SGD subtracts lr times these gradients, all in fp32, from fp32 weights."""
    session = build(kind, **OPTIONS[options])
    before = copy.deepcopy(session.weights())
    for micro in range(session.accumulate):
        backward(session, micro)
        if micro + 1 < session.accumulate:
            session.step()
    grads = read(session)
    assert {*grads} == {name for name in before if name != "unused"}
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    squares = sum(grad.to_dense().double().square().sum() for grad in grads.values())
    torch.testing.assert_close(session.grad_norm(), squares.sqrt().float())
    assert session.step().applied
    after = session.weights()
    low = kind.startswith("O3")
    for name, grad in grads.items():
        expected = before[name] - 0.1 * grad
        slack, floor = (2.0**-7, 1e-3) if low else (2.0**-22, 1e-7)
        torch.testing.assert_close(after[name], expected, rtol=slack, atol=floor)


@pytest.mark.parametrize(("kind", "accumulate"), [("O1 bf16", 1), ("O2 bf16", 2)])
def test_ddp(kind: str, accumulate: int) -> None:
    """Law: under DDP too; a mean over ranks that `step` would take is taken here."""
    with group_of_one():
        sessions = []
        for reads in (True, False):
            session = build(kind, accumulate=accumulate)
            session.model.rows.requires_grad_(requires_grad=False)
            session.model.unused.requires_grad_(requires_grad=False)
            session.model = DistributedDataParallel(session.model)
            sessions.append(session)
            for micro in range(2 * accumulate):
                backward(session, micro)
                if reads and micro % accumulate == accumulate - 1:
                    assert len(read(session)) == 6
                session.step()
        assert same(*(session.state_dict() for session in sessions))


def test_the_wrong_moment_is_named() -> None:
    """Law: without complete gradients it is refused at once, and says when to call."""
    session = build("O2 bf16", accumulate=2)
    for call in (session.grads, session.grad_norm):
        words = rf"^session\.{call.__name__}\(\) was called without a backward"
        with pytest.raises(UserError, match=words):
            call()
    backward(session, 0)
    with pytest.raises(UserError, match="was called in micro-batch"):
        session.grads()
    session.step()
    with pytest.raises(UserError, match="micro-batch 1 of 2"):
        session.grads()
    backward(session, 1)
    assert read(session)
    session.step()
    with pytest.raises(UserError, match=r"call it between session\.backward"):
        session.grads()
    early = build("O2 bf16", optimizer_in_backward=True)
    with pytest.raises(UserError, match=r"^optimizer_in_backward=True .* excludes ses"):
        early.grads()

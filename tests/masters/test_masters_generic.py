"""Optimizers that must step themselves: of others, watched, patched; and their groups.

In: masters over them, in every form. Out: the weights of a plain fp32 loop.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import master_cases as cases
import pytest
import torch
from master_cases import Make
from small_training import same
from torch import nn

from halfstep.masters import MasterWeights, generic_step
from halfstep.session.session import Session

every_exact = pytest.mark.parametrize("form", cases.FORMS[:2])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step over a few numbers at a time, where that is allowed."""
    monkeypatch.setattr(generic_step, "MAX_PIECE_NUMEL", 8)


class Counting(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["count"])


def follow(
    make: Make, form: str, steps: int = 4, **more: Any
) -> tuple[Session, cases.Twin]:
    session = cases.start(make, form, **more)
    twin = cases.Twin(make, session)
    seen = cases.Watched(session.model)
    for number in range(steps):
        cases.go(session, cases.slopes_of(session.model, number))
        twin.step(seen.seen)
        seen.clear()
    return session, twin


def assert_same(session: Session, twin: cases.Twin) -> None:
    truths = session.weights()
    assert all(torch.equal(truths[n], p) for n, p in twin.params.items())


@cases.every_form
def test_a_counter_of_each_group(form: str) -> None:
    """Law: another's optimizer steps once a step, and not once a piece."""
    session, twin = follow(Counting, form)
    assert session.optimizer.param_groups[0]["count"] == 4
    if form in cases.FORMS[:2]:
        assert_same(session, twin)


@cases.every_form
@pytest.mark.parametrize("make", [cases.ADAMW, torch.optim.RMSprop])
def test_step_hooks(form: str, make: Make) -> None:
    """Law: hooks run once a step, and see all masters in fp32, before and after."""
    session = cases.start(make, form)
    calls: list[str] = []

    def look(word: str, optimizer: torch.optim.Optimizer, *_: object) -> None:
        calls.append(word)
        for param in cases.adopted(optimizer):
            if param.grad is not None:
                assert param.dtype == torch.float32
                assert bool(torch.isfinite(param).all())

    twin = cases.Twin(make, session)
    seen = cases.Watched(session.model)
    session.optimizer.register_step_pre_hook(partial(look, "before"))
    session.optimizer.register_step_post_hook(partial(look, "after"))
    for number in range(4):
        cases.go(session, cases.slopes_of(session.model, number))
        twin.step(seen.seen)
        seen.clear()
    assert "step hooks" in cases.masters_of(session).describe()
    assert calls == ["before", "after"] * 4
    if form in cases.FORMS[:2]:
        assert_same(session, twin)


@cases.every_form
def test_a_rate_that_is_a_tensor(form: str) -> None:
    """Law: a rate in a tensor is read at each step; powers of two keep each bit."""
    sessions = [
        cases.start(partial(torch.optim.SGD, lr=lr), form)
        for lr in (torch.tensor(0.25), 0.25)
    ]
    for number in range(3):
        slopes = cases.slopes_of(sessions[0].model, number)
        for session in sessions:
            cases.go(session, slopes)
        assert same(*(session.weights() for session in sessions))
        sessions[0].optimizer.param_groups[0]["lr"].mul_(0.5)
        sessions[1].optimizer.param_groups[0]["lr"] *= 0.5


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, total_iters=3),
}


@every_exact
@pytest.mark.parametrize(
    ("name", "make"),
    [*zip(SCHEDULES, (cases.MOMENTUM, cases.ADAMW, cases.NADAM), strict=True)],
)
@pytest.mark.parametrize("way", ["session's", "user's"])
@cases.both_ways
def test_schedules(form: str, name: str, make: Make, way: str, *, kernel: bool) -> None:
    """Law: no warning about the order, and the rates of a plain loop."""
    session = cases.start(make, form, kernel=kernel)
    twin = cases.Twin(make, session)
    schedule = SCHEDULES[name](session.optimizer)
    reference = SCHEDULES[name](twin.optimizer)
    if way == "session's":
        session.scheduler = schedule
    seen = cases.Watched(session.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5):
            cases.go(session, cases.slopes_of(session.model, number))
            if way == "user's":
                schedule.step()
            twin.step(seen.seen)
            seen.clear()
            reference.step()
            assert schedule.get_last_lr() == reference.get_last_lr()
    if not kernel:
        assert_same(session, twin)


@cases.every_form
@cases.both_ways
def test_groups_have_rates_of_their_own(form: str, *, kernel: bool) -> None:
    """Law: groups keep their rates; fp32 norms of the same group move in fp32."""
    model = cases.Mixed()
    groups = [
        {"params": [*model.linear.parameters(), *model.norm.parameters()]},
        {"params": [*model.conv.parameters()], "lr": 0.25},
        {"params": [model.other.weight], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, 1.0)
    session = cases.prepare(model, optimizer, kernel=kernel, master=form)
    before = session.weights()
    before = {name: value.clone() for name, value in before.items()}
    slopes = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    cases.go(session, slopes)
    rates = {"linear": 1.0, "norm": 1.0, "conv": 0.25, "other": 0.0}
    loss = {"fp32": 0.0, "split": 0.0, "kahan": 2.0**-17, "stochastic": 2.0**-7}[form]
    for name, value in session.weights().items():
        right = before[name] - rates[name.split(".")[0]]
        own = 0.0 if "norm" in name else loss
        assert bool(((value - right).abs() <= own * right.abs()).all()), name
    assert model.norm.weight.dtype == torch.float32
    assert [len(g["params"]) for g in session.optimizer.param_groups] == [4, 2, 1]


@cases.every_form
@cases.both_ways
def test_zero_grad_by_hand(form: str, *, kernel: bool) -> None:
    """Law: whoever zeroes gradients, and however, the next step counts its own."""
    sessions = [cases.start(cases.SGD, form, kernel=kernel) for _ in range(2)]
    for number in range(3):
        slopes = cases.slopes_of(sessions[0].model, number)
        for session in sessions:
            cases.go(session, slopes)
        sessions[0].optimizer.zero_grad(set_to_none=False)
        sessions[0].model.zero_grad(set_to_none=bool(number % 2))
    assert same(*(cases.everything(session) for session in sessions))


@cases.every_form
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_sparse_and_dense_add_up(form: str, order: tuple[int, int]) -> None:
    """Law: micro-batches may leave sparse and dense gradients, in any order."""
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], 0.5)
    masters = MasterWeights(optimizer, master=form)
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    table(torch.tensor([1])).sum().backward()
    kinds = [table.weight.grad, torch.ones(4, 2, dtype=torch.bfloat16)]
    for kind in order:
        weight.grad = kinds[kind].clone()
        masters.accumulate_grads()
    masters.step()
    row = [torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.ones(4)]
    right = 1 - 0.5 * sum(row[kind] for kind in order)
    (held,) = cases.adopted(optimizer)
    assert torch.equal(masters.fp32_value(held)[:, 0], right)

"""Optimizers that must step themselves: of others, watched, patched; and their groups.

In: masters over them, in every form. Out: the weights of a plain fp32 loop.
"""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import master_cases as cases
import pytest
import torch
from master_cases import Make
from small_training import same
from torch import nn

from halfstep.errors import UserError
from halfstep.masters import MasterWeights, cpu_kernels, generic_step
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


class Vector(torch.optim.Optimizer):
    """SGD over all parameters as one vector, as in natural-gradient methods."""

    def __init__(self, params: Any, *, in_place: bool = False) -> None:
        super().__init__(params, {"in_place": in_place})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            params: list[nn.Parameter] = group["params"]
            slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            values = [
                p.mul(1 - 2**-6).sub_(s, alpha=2**-6)
                for p, s in zip(params, slopes, strict=True)
            ]
            if group["in_place"]:
                for param, value in zip(params, values, strict=True):
                    param.copy_(value)
            else:
                vector = torch.cat([value.flatten() for value in values])
                nn.utils.vector_to_parameters(vector, params)


class Difference(torch.optim.Optimizer):
    """Steps along 2g - last g; keeps the last gradient by reference, as Adan does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.last: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for param in chain(*(group["params"] for group in self.param_groups)):
            if param.grad is not None:
                last = self.last.get(param, param.grad)
                param.sub_(2 * param.grad - last, alpha=0.5)
                self.last[param] = param.grad


class Stopping(Counting):
    """Raises after the update of two parameters, once `stops` is set."""

    stops = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if self.stops:
            self.param_groups[0]["params"] = params[:2]
        super().step(closure)
        if self.stops:
            self.param_groups[0]["params"] = params
            raise KeyboardInterrupt


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
def test_data_that_is_assigned(form: str) -> None:
    """Law: `p.data = ...` in a step is an update as one in place, to the bit.

    Weights without a gradient, which decay here, are updated too.
    """
    assigned, _ = follow(Vector, form)
    in_place, _ = follow(partial(Vector, in_place=True), form)
    assert same(cases.everything(assigned), cases.everything(in_place))
    if form in cases.FORMS[:2]:
        assert_same(*follow(Vector, form))


@every_exact
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_kept(form: str, accumulate: int) -> None:
    """Law: a gradient that an optimizer refers to is not written to after its step."""
    session = cases.start(Difference, form, accumulate=accumulate)
    twin = cases.Twin(Difference, session)
    seen = cases.Watched(session.model)
    for number in range(4):
        slopes = [cases.slopes_of(session.model, number + i) for i in range(accumulate)]
        cases.go(session, *slopes)
        twin.step(seen.seen)
        seen.clear()
        assert_same(session, twin)


@cases.every_form
def test_a_step_that_raises_before_it_begins(form: str) -> None:
    """Law: it changes no bit, and training goes on as if nobody had tried it."""
    session, undisturbed = cases.trained(form), cases.trained(form)

    def fail(*_: object) -> None:
        raise LookupError

    before = cases.everything(session)
    hook = session.optimizer.register_step_pre_hook(fail)
    with pytest.raises(LookupError):
        cases.go(session, cases.slopes_of(session.model, 2))
    hook.remove()
    assert same(cases.everything(session), before)
    for each in (session, undisturbed):
        cases.go(each, cases.slopes_of(each.model, 2))  # warnings are errors
    assert same(cases.everything(session), cases.everything(undisturbed))


@cases.every_form
def test_a_step_that_raises_half_way(form: str) -> None:
    """Law: what it has updated is kept as a full step would; the rest has its bits."""
    session, full = (cases.start(Stopping, form) for _ in range(2))
    for each in (session, full):
        cases.go(each, cases.slopes_of(each.model, 1))
    before, slopes = cases.everything(session), cases.slopes_of(session.model, 2)
    session.optimizer.stops = True  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        cases.go(session, slopes)
    cases.go(full, slopes)
    after, complete = cases.everything(session), cases.everything(full)
    for part in range(2):  # weights, residuals
        assert same(after[part][:2], complete[part][:2])
        assert same(after[part][2:], before[part][2:])
    assert not same(after[0][:2], before[0][:2])
    session.optimizer.stops = False  # type: ignore[attr-defined]
    session.zero_grad()
    cases.go(session, slopes)  # without a warning, which is an error


@cases.every_form
def test_a_group_that_raises(form: str) -> None:
    """Law: the groups that a kernel has updated before it keep their update."""
    sessions = []
    for _ in range(2):
        model = cases.Mixed()
        groups = [{"params": each.parameters()} for each in (model.linear, model.conv)]
        sessions.append(cases.prepare(model, cases.ADAMW(groups), master=form))
        cases.go(sessions[-1], cases.slopes_of(model, 1))
    session, full = sessions
    slopes = cases.slopes_of(session.model, 2)
    bias = session.optimizer.param_groups[1]["params"][1]
    state = session.optimizer.state[bias]
    session.optimizer.state[bias] = state | {"exp_avg": torch.zeros(7)}
    with pytest.raises((RuntimeError, UserError)):
        cases.go(session, slopes)
    session.optimizer.state[bias] = state
    cases.go(full, slopes)
    before = session.weights()
    for name in ("linear.weight", "linear.bias"):
        assert torch.equal(before[name], full.weights()[name])
    session.zero_grad()
    session.optimizer.param_groups[0]["lr"] = 0.0
    cases.go(session, slopes)  # without a warning, which is an error


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


@cases.every_form
def test_without_a_compiler(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the optimizer's own step serves, and the reason is in the description."""
    own = cases.start(cases.ADAMW, form, kernel=False)
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    monkeypatch.setattr(cpu_kernels, "describe", lambda: "not compiled: no cc")
    session = cases.start(cases.ADAMW, form)
    assert cases.masters_of(session).kernel is None
    assert cases.masters_of(session).describe().endswith("not compiled: no cc")
    for each in (own, session):
        cases.go(each, cases.slopes_of(each.model, 1))
    assert same(*map(cases.everything, (own, session)))

"""Weights that come late, states that others edit, steps that end half-way."""

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import master_cases as cases
import pytest
import torch
from small_training import same
from tests.session.test_session_traps import backward, elsewhere
from torch import Tensor, nn

from halfstep.errors import UserError
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

every_form = pytest.mark.parametrize("form", ["fp32", "split", "stochastic"])
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "release": {"optimizer_in_backward": True},
}


def crossed(name: str, *values: Any, every: int = 3) -> Any:
    """Cross forms, ways and values so that each two of them meet, not each three."""
    numbered = enumerate(("fp32", "split", "stochastic"))
    return pytest.mark.parametrize(
        ("form", "way", name),
        [
            (form, way, value)
            for i, form in numbered
            for j, way in enumerate(WAYS.values())
            for k, value in enumerate(values)
            if (i + j + k) % every == 0
        ],
    )


RMSPROP: cases.Make = partial(torch.optim.RMSprop, lr=0.01, momentum=0.5)


def step(session: Session, *seeds: int) -> StepReport:
    slopes = [cases.slopes_of(session.model, seed) for seed in seeds]
    return cases.go(session, *slopes[: session.accumulate])


def without(model: nn.Module, name: str) -> tuple[int, int]:
    names = [found for found, _ in model.named_parameters()]
    place = names.index(name)
    assert name not in cases.slopes_of(model, place)
    return place, place + len(names)


@every_form
@pytest.mark.parametrize("others", [True, False])
def test_passes_of_others(form: str, *, others: bool) -> None:
    """Law: a gradient of another pass is not used, and stays where it was left."""
    ours, right = (
        cases.start(cases.ADAMW, form, optimizer_in_backward=True) for _ in range(2)
    )
    for session in (ours, right):
        step(session, 1)
    slopes = {n: torch.ones_like(p) for n, p in ours.model.named_parameters()}
    if others:
        elsewhere(ours.model, slopes)
    else:
        ours.model(slopes).backward()
    assert same(cases.everything(ours), cases.everything(right))
    assert same({n: p.grad for n, p in ours.model.named_parameters()}, slopes)
    ours.optimizer.zero_grad()
    assert all(param.grad is None for param in ours.model.parameters())
    for session in (ours, right):
        step(session, 2)
    assert same(cases.everything(ours), cases.everything(right))


@crossed("name", "linear.weight", "other.weight", "norm.weight")
def test_an_unfrozen_weight(form: str, way: dict[str, Any], name: str) -> None:
    """Law: it trains from then on, as one that had only had no gradient before."""
    sessions = []
    for frozen in (True, False):
        model = cases.Mixed()
        weight = model.get_parameter(name).requires_grad_(requires_grad=not frozen)
        session = cases.prepare(
            model, cases.ADAMW(model.parameters()), master=form, **way
        )
        step(session, *without(model, name))
        before = weight.detach().clone()
        model.get_parameter(name).requires_grad_()
        step(session, 1, 4)
        step(session, 4, 5)
        assert not torch.equal(model.get_parameter(name), before)
        sessions.append(session)
    assert same(*map(cases.everything, sessions))


@every_form
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_unfrozen_weight_is_counted(form: str, accumulate: int) -> None:
    """Law: lost updates are counted of weights that came to be trained later."""
    model = cases.Mixed()
    model.linear.weight.requires_grad_(requires_grad=False)
    more = {"master": form, "accumulate": accumulate}
    session = cases.prepare(model, cases.SGD(model.parameters()), **more)
    session.count_rounding_loss(every=1)
    step(session, *without(model, "linear.weight"))
    (first,) = session.lost_updates()
    total = sum(param.numel() for param in model.parameters())
    assert first.counts[0] == total - model.linear.weight.numel()
    model.linear.weight.requires_grad_()
    slopes = {"linear.weight": torch.ones(6, 5)}
    for _ in range(accumulate):
        cases.go(session, slopes)
    (found,) = session.lost_updates()
    assert found.counts[0] == model.linear.weight.numel()


@crossed("make", cases.ADAMW, RMSPROP, every=2)
def test_a_parameter_appended(form: str, way: dict[str, Any], make: cases.Make) -> None:
    """Law: what is appended to a group gets a master, as if there before."""
    sessions = []
    for late in (True, False):
        model = cases.Mixed()
        weight = model.other.weight
        weight.data = weight.data.bfloat16().float()
        rest = [p for p in model.parameters() if p is not weight]
        optimizer = make(rest if late else [*rest, weight])
        session = cases.prepare(model, optimizer, master=form, **way)
        weight = model.other.weight
        step(session, *without(model, "other.weight"))
        before = weight.detach().clone()
        if late:
            optimizer.param_groups[0]["params"].append(weight)
        step(session, 1, 3)
        step(session, 4, 5)
        last = optimizer.param_groups[0]["params"][-1]
        assert last.dtype == torch.float32
        assert cases.masters_of(session).model_param(last) is weight
        assert not torch.equal(weight, before)
        sessions.append(session)
    assert same(*map(cases.everything, sessions))


@crossed("make", cases.ADAMW, RMSPROP, every=2)
def test_loaded_in_mid_step(form: str, way: dict[str, Any], make: cases.Make) -> None:
    """Law: no state is given while a step is under way; one may be loaded then."""
    sessions = [cases.start(make, form, **way) for _ in range(2)]
    for session in sessions:
        step(session, 1, 2)
        saved = copy.deepcopy(session.state_dict())
        step(session, 2, 3)
    ours, right = sessions
    for act in (backward, cases.go)[: ours.accumulate]:
        act(ours, cases.slopes_of(ours.model, 3))
        with pytest.raises(RuntimeError, match="would lose their gradients"):
            ours.state_dict()
        ours.load_state_dict(saved)
        right.load_state_dict(saved)
        assert same(*map(cases.everything, sessions))
    for session in sessions:
        for seed in (4, 5):
            assert step(session, seed, seed + 1).left_out == ()
    assert same(*map(cases.everything, sessions))
    assert ours.steps_applied == right.steps_applied == 3


@pytest.mark.parametrize("release", [False, True])
def test_what_may_be_set(release: bool) -> None:
    """Law: a norm that is none, or for which no weight waits, is refused later."""
    more = {"optimizer_in_backward": True} if release else {"accumulate": 2}
    session = cases.start(cases.SGD, "split", **more)
    for bad in (-1, 0.0, -math.inf, math.nan, *([1.0] if release else [])):
        with pytest.raises(UserError, match="clip_grad_norm") as raised:
            session.clip_grad_norm = bad
        assert len(str(raised.value).split()) <= 35
    assert session.clip_grad_norm is None
    for good in (math.inf, None if release else 0.5):
        session.clip_grad_norm = good
        assert session.clip_grad_norm == good
    assert step(session, 1, 2).applied
    with pytest.raises(AttributeError):
        session.accumulate = 4  # type: ignore[misc]
    assert session.accumulate == (1 if release else 2)


@every_form
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_all_gradients_bad(form: str, value: float, *, kernel: bool) -> None:
    """Law: a step that moved nothing is a skipped one."""
    session = cases.start(cases.ADAMW, form, optimizer_in_backward=True, kernel=kernel)
    assert step(session, 1).applied
    weights, extras, states, _ = cases.everything(session)
    slopes = cases.slopes_of(session.model, 2)
    bad = {name: slope.float() * value for name, slope in slopes.items()}
    report = cases.go(session, bad)
    assert report.skipped
    assert not report.applied
    assert {*report.left_out} == {*bad}
    assert (session.steps_applied, session.steps_skipped) == (1, 1)
    assert same([weights, extras, states], cases.everything(session)[:3])
    report = cases.go(session, slopes | {"conv.weight": bad["conv.weight"]})
    assert (report.applied, report.left_out) == (True, ("conv.weight",))
    assert (session.steps_applied, session.steps_skipped) == (2, 1)


class Words(nn.Module):
    """A table of words, of which a batch reads a few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.table(words)))  # type: ignore[no-any-return]


@every_form
@pytest.mark.parametrize("kernel", [True, False])
def test_sparse_gradients(form: str, *, kernel: bool) -> None:
    """Law: sparse gradients are released as they are used in an ordinary step.

    Words that no batch reads stay; a word that it reads twice counts twice. A kernel
    may round other weights otherwise than the ordinary step, which has none here.
    """
    sessions = [
        cases.start(cases.SGD, form, Words(), optimizer_in_backward=release)
        for release in (True, False)
    ]
    if not kernel:
        for session in sessions:
            cases.masters_of(session).kernel = None
    before = sessions[0].model.table.weight.detach().clone()
    for words in ([1, 4, 4], [2, 1, 1]):
        for session in sessions:
            with session.autocast():
                out = session.model(torch.tensor(words)).float()
                loss = (out - torch.tensor([1.0, -1.0])).square().sum()
            session.backward(loss)
            assert session.step().applied
        if words[0] == 1:
            tables = [session.weights()["table.weight"] for session in sessions]
            assert same(*tables)
    if not kernel:
        assert same(*map(cases.everything, sessions))
    moved = (sessions[0].model.table.weight != before).any(1)
    assert moved.tolist() == [word in {1, 2, 4} for word in range(9)]


def counters(session: Session) -> list[float]:
    return [float(state["step"]) for state in session.optimizer.state.values()]


@every_form
@pytest.mark.parametrize("cause", ["kernel", "state"])
def test_an_update_that_fails(form: str, cause: str) -> None:
    """Law: an error inside an update leaves counters, weights and clock alone."""
    sessions = [cases.start(cases.ADAMW, form) for _ in range(2)]
    for session in sessions:
        for seed in (1, 2):  # by then each parameter has a state
            step(session, seed)
    ours = sessions[0]
    counted = counters(ours)
    masters = cases.masters_of(ours)
    kernel = masters.kernel
    assert kernel is not None
    state = ours.optimizer.state[cases.by_name(ours)["linear.weight"]]
    moment = state["exp_avg"]
    before = cases.everything(ours)

    def fail(*_: object, **__: object) -> None:
        message = "the kernel fails"
        raise RuntimeError(message)

    if cause == "kernel":
        masters.kernel = dataclasses.replace(kernel, update=fail)
    else:
        state["exp_avg"] = torch.zeros(7)
    told = "the kernel fails" if cause == "kernel" else "size|shape"
    with pytest.raises((RuntimeError, ValueError), match=told):
        step(ours, 4)
    masters.kernel = kernel
    state["exp_avg"] = moment
    assert counters(ours) == counted
    assert same(cases.everything(ours), before)
    ours.zero_grad()
    for session in sessions:
        step(session, 5)
    assert counters(ours) == counters(sessions[1])
    assert same(*map(cases.everything, sessions))


def widen(state: dict[str, Any], dtype: torch.dtype) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = state[key].to(dtype)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "int": lambda state: state.update(step=int(state["step"])),
    "int64": lambda state: state.update(step=state["step"].long()),
    "float64": lambda state: state.update(step=state["step"].double()),
    "fp32 moments": lambda state: widen(state, torch.float32),
    "fp64 moments": lambda state: widen(state, torch.float64),
}


@crossed("edit", *EDITS)
def test_states_of_other_types(form: str, way: dict[str, Any], edit: str) -> None:
    """Law: Adam's counter, and moments, may be of any type; training goes on alike."""
    sessions = [cases.start(cases.ADAMW, form, **way) for _ in range(2)]
    for session in sessions:
        step(session, 0, 1)
        step(session, 2, 3)
    for state in sessions[0].optimizer.state.values():
        EDITS[edit](state)
    for session in sessions:
        step(session, 4, 5)
        step(session, 6, 7)
    assert same(*map(cases.everything, sessions))

"""Saved scaler states: of our own, of torch's and of apex's, and broken ones."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from session_cases import any_machine  # noqa: F401
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling import LossScaler, ScaleRule

INF = math.inf
SGD = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5)
STRATEGIES = ["backoff", "measured", "logmax"]
FIELDS = ["scale", "clean_steps", "hysteresis_left", "skips_in_a_row"]

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Loop:
    def __init__(self, scaler: Any) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.optimizer: Any = SGD([("weight", self.weight)])
        self.scaler = scaler

    def step(self, factor: float, name: str | None = None) -> None:
        self.optimizer.zero_grad()
        loss = (self.weight.square() * factor).half().float().sum()
        if name is None:
            self.scaler.scale(loss).backward()
        else:
            self.scaler.backward(loss, self.optimizer, name=name)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours(**numbers: Any) -> Any:
    given = {
        "init_scale": 64.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "hysteresis": 3,
    }
    return hs.GradScaler("cpu", **(given | numbers))


# A state with every counter away from its beginning: 64 -> (2 overflows borne) 64 ->
# (third) 16 -> 2 clean steps -> 2 overflows in a row, for none are left to bear: 1.
TRACE = [INF, INF, INF, 1.0, 1.0, INF, INF]


def through(way: str, state: Any) -> Any:
    if way == "as it is":
        return state
    if way == "pickle":
        return pickle.loads(pickle.dumps(state))  # noqa: S301
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", ["as it is", "pickle", "torch.save"])
@pytest.mark.parametrize("used", [False, True])
def test_every_counter(way: str, used: bool) -> None:
    """Law: a fresh scaler goes on with each counter, before its first use or after."""
    loop, twin = Loop(ours()), Loop(ours())
    for value in TRACE:
        loop.step(value)
    loop.step(1.0, "aux")
    loop.step(INF, "aux")
    state = loop.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (1.0, 0)
    main, aux = state["_halfstep"][""], state["_halfstep"]["aux"]
    assert [main[field] for field in FIELDS] == [1.0, 0, -2, 2]
    assert [aux[field] for field in FIELDS] == [64.0, 0, 2, 1]
    if used:
        twin.step(1.0)
        twin.step(1.0, "other")
    twin.scaler.load_state_dict(through(way, state))
    assert twin.scaler.state_dict() == state
    assert twin.scaler.get_scale() == 1.0
    twin.weight.data.copy_(loop.weight.data)
    twin.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    for value, name in [(1.0, None), (INF, "aux"), (INF, "aux"), *[(1.0, None)] * 5]:
        for each in (loop, twin):
            each.step(value, name)
        assert twin.scaler.state_dict() == loop.scaler.state_dict()
    same(twin.weight, loop.weight)
    # The growth after five clean steps has brought back what can be borne.
    assert loop.scaler.state_dict()["_halfstep"][""]["hysteresis_left"] == 3
    assert loop.scaler.state_dict()["_halfstep"]["aux"]["scale"] == 16.0


def test_saved_before_the_first_use() -> None:
    """Law: a state passes through a scaler that is never used."""
    loop = Loop(ours())
    for value in TRACE:
        loop.step(value)
    state = loop.scaler.state_dict()
    for _ in range(3):
        middle = ours()
        middle.load_state_dict(state)
        assert middle.state_dict() == state
        middle = pickle.loads(pickle.dumps(middle))  # noqa: S301
        assert middle.state_dict() == state


@strategies
@pytest.mark.parametrize("way", ["state", "file", "pickle", "deepcopy"])
def test_resumed_is_uninterrupted(strategy: str, way: str) -> None:
    """Law: after any trace of overflows a run that resumed is the run that did not."""
    names = [None] * 8 if way != "file" else ["a", "", "a", "", "b", "", "a", "b"]
    for seed in range(6):
        rng = random.Random(f"{strategy} {way} {seed}")  # noqa: S311
        numbers: Any = {"strategy": strategy, "refill": rng.choice(["growth", "clean"])}
        straight, broken = (Loop(ours(**numbers)) for _ in range(2))
        for number in range(24):
            value = rng.choice([1.0, 1.0, 2.0**-6, 2.0**6, 1e4, INF])
            for each in (straight, broken):
                each.step(value, names[number % len(names)])
            assert broken.scaler.state_dict() == straight.scaler.state_dict()
            same(broken.weight, straight.weight)
            if rng.random() < 0.5:
                continue
            if way in {"state", "file"}:
                kind = "torch.save" if way == "file" else "as it is"
                state = through(kind, broken.scaler.state_dict())
                broken.scaler = ours(**numbers)
                broken.scaler.load_state_dict(state)
            elif way == "pickle":
                broken.scaler = through("pickle", broken.scaler)
            else:
                broken.scaler = copy.deepcopy(broken.scaler)


# Of others


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_from_torch_and_back(used: bool, seed: int) -> None:
    """Law: torch's state goes on here as it would there, and ours there."""
    rng = random.Random(seed)  # noqa: S311
    numbers = (2.0**10, 4.0, 0.25, 3)
    theirs = Loop(torch.amp.GradScaler("cpu", *numbers))
    mine = Loop(hs.GradScaler("cpu"))
    if used:
        mine.step(1.0)
    for _ in range(6):
        for _ in range(rng.randrange(1, 5)):
            theirs.step(rng.choice([1.0, 1.0, INF]))
        mine.scaler.load_state_dict(theirs.scaler.state_dict())
        mine.weight.data.copy_(theirs.weight.data)
        mine.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
        for _ in range(rng.randrange(1, 5)):
            value = rng.choice([1.0, 1.0, INF])
            mine.step(value)
            theirs.step(value)
            state = mine.scaler.state_dict()
            assert {k: state[k] for k in state if k != "_halfstep"} == (
                theirs.scaler.state_dict()
            )
            same(mine.weight, theirs.weight)
        theirs.scaler = torch.amp.GradScaler("cpu")
        theirs.scaler.load_state_dict(mine.scaler.state_dict())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_from_apex(used: bool, whole: bool) -> None:
    """Law: apex's scale and clean steps go on; what it does not save stays ours."""
    entry = {"loss_scale": 32.0, "unskipped": 3}
    other = {"loss_scale": 8.0, "unskipped": 1}
    state: Any = {"loss_scaler0": entry, "loss_scaler1": other} if whole else entry
    loop = Loop(ours())
    if used:
        loop.step(1.0)
    loop.scaler.load_state_dict(through("torch.save", state))
    assert loop.scaler.get_scale() == 32.0
    assert loop.scaler.get_growth_factor() == 4.0
    # Two more clean steps make five, and the scale grows fourfold.
    seen = []
    for _ in range(2):
        loop.step(1.0)
        seen.append(loop.scaler.get_scale())
    assert seen == [32.0, 128.0]


@pytest.mark.parametrize("kind", ["torch", "apex"])
@pytest.mark.parametrize("used", [False, True])
def test_a_scale_below_one_is_known_at_once(kind: str, used: bool) -> None:
    """Law: unscaling that makes 1e38 * 1024 of 1e38 is seen in the first step, too."""
    states: dict[str, Any] = {"apex": {"loss_scale": 2.0**-10, "unskipped": 0}}
    states["torch"] = torch.amp.GradScaler("cpu", 2.0**-10).state_dict()
    loop = Loop(hs.GradScaler("cpu"))
    if used:
        loop.step(1.0)
    before = loop.weight.detach().clone()
    loop.scaler.load_state_dict(states[kind])
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.weight.sum()).backward()
    loop.weight.grad = torch.full((4,), 1e38)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.skipped
    same(loop.weight.detach(), before)


def test_disabled_states() -> None:
    """Law: a disabled scaler saves nothing, takes anything; an enabled one refuses."""
    off: Any = hs.GradScaler("cpu", enabled=False)
    assert off.state_dict() == {}
    off.load_state_dict({"loss_scaler0": 3})
    with pytest.raises(RuntimeError) as theirs:
        torch.amp.GradScaler("cpu").load_state_dict({})
    with pytest.raises(RuntimeError) as caught:
        ours().load_state_dict({})
    assert str(caught.value) == str(theirs.value)


# Broken ones


def worn(rule: ScaleRule) -> LossScaler:
    scaler = LossScaler(rule)
    for flag in (1.0, 0.0, 0.0, 1.0):
        scaler.unscale_([torch.ones(2)])
        scaler.update(torch.tensor(flag))
    return scaler


@strategies
@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field(strategy: str, field: str) -> None:
    """Law: it is refused by name, and nothing of the state is taken in."""
    rule = ScaleRule(64.0, hysteresis=2, strategy=strategy)
    scaler, state = LossScaler(rule), worn(rule).state_dict()
    del state[field]
    before = scaler.state_dict()
    with pytest.raises(UserError) as caught:
        scaler.load_state_dict(state)
    words = f"loss-scale state has no '{field}'; it holds {[*state]}."
    assert str(caught.value) == words
    assert scaler.state_dict() == before


@pytest.mark.parametrize("field", ["applied", "begun", "history", "in_a_row"])
def test_a_missing_memory(field: str) -> None:
    """Law: what is remembered of the steps is whole too, or refused by name."""
    scaler, state = LossScaler(ScaleRule()), worn(ScaleRule()).state_dict()
    del state["watch"][field]
    before = scaler.state_dict()
    with pytest.raises(UserError, match=f"^loss-scale state's 'watch' .* {field!r};"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("applied", -1),
        ("applied", 1.5),
        ("begun", None),
        ("history", 3),
        ("history", [0.0]),
        ("history", [INF]),
        ("in_a_row", "2"),
    ],
)
def test_a_memory_of_another_kind(field: str, value: object) -> None:
    """Law: what cannot have been saved is refused by name, and nothing is taken in."""
    scaler, state = LossScaler(ScaleRule()), worn(ScaleRule()).state_dict()
    state["watch"][field] = value
    before = scaler.state_dict()
    with pytest.raises(UserError, match=rf"^watch\['{field}'\]=") as caught:
        scaler.load_state_dict(state)
    assert len(str(caught.value).split()) <= 35
    assert scaler.state_dict() == before


@pytest.mark.parametrize("used", [False, True])
def test_a_broken_state_is_refused_whole(used: bool) -> None:
    """Law: a scaler refuses a state in `load_state_dict`, and stays as it was."""
    loop, fresh = Loop(ours()), Loop(ours())
    for value in TRACE:
        loop.step(value)
    loop.step(1.0, "aux")
    if used:
        fresh.step(1.0)
        fresh.step(1.0, "aux")
    before, state = fresh.scaler.state_dict(), loop.scaler.state_dict()
    del state["_halfstep"]["aux"]["scale"]
    with pytest.raises(UserError, match=r"^loss-scale state has no 'scale'; it holds"):
        fresh.scaler.load_state_dict(state)
    assert fresh.scaler.state_dict() == before


# A session's


def session(level: str = "O2", dtype: str = "fp16", **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return hs.prepare(model, SGD(model.parameters()), level, dtype=dtype, **more)


def go(one: Any, factor: float, names: tuple[str, ...] = ("",)) -> None:
    """Run one step; the last of several losses is multiplied by `factor`."""
    for name in names:
        with one.autocast():
            loss = one.model(torch.ones(5, 3)).float().square().mean()
        one.backward(loss * (factor if name == names[-1] else 1.0), name=name)
    one.step()


def bits(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [bits(value) for value in state.values() if not isinstance(value, str)]
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    return [state.tolist() if isinstance(state, Tensor) else state]


Break = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda s: s["scales"][""].pop("clean_steps"), "has no 'clean_steps'"),
        (lambda s: s["scales"]["b"].pop("scale"), "has no 'scale'"),
        (lambda s: s["scales"][""]["watch"].pop("begun"), "has no 'begun'"),
        (lambda s: s["scales"][""].update(watch=None), "'watch' is of type NoneType"),
        (lambda s: s["weights"].pop("0.bias"), "weight '0.bias': the state holds no"),
        (lambda s: s.update(version=1), "session state has version 1"),
    ],
)
def test_a_broken_session_state_is_refused_whole(harm: Break, words: str) -> None:
    """Law: a state is refused by name before anything of it is taken in."""
    worn_out, fresh = session(), session()
    for value in (1.0, INF, 1.0):
        go(worn_out, value, ("", "b"))
    go(fresh, 1.0, ("", "b"))
    state, before = copy.deepcopy(worn_out.state_dict()), bits(fresh.state_dict())
    harm(state)
    with pytest.raises(UserError) as caught:
        fresh.load_state_dict(state)
    assert words in str(caught.value)
    assert bits(fresh.state_dict()) == before

"""Saved scaler states: of our own, of torch's and of apex's, and broken ones."""

import copy
import functools
import io
import math
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling import LossScaler, ScaleRule

INF = math.inf
SGD = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5)
FIELDS = ["scale", "clean_steps", "hysteresis_left", "skips_in_a_row"]

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
    given: dict[str, Any] = {"init_scale": 64.0, "growth_factor": 4.0}
    given |= {"backoff_factor": 0.25, "growth_interval": 5, "hysteresis": 3}
    return hs.GradScaler("cpu", **(given | numbers))


# A state with every counter away from its beginning: 64 -> (2 overflows borne) 64 ->
# (third) 16 -> 2 clean steps -> 2 overflows in a row, for none are left to bear: 1.
TRACE = [INF, INF, INF, 1.0, 1.0, INF, INF]


@pytest.mark.parametrize("strategy", ["backoff", "measured", "logmax"])
@pytest.mark.parametrize("way", ["state", "file", "pickle", "deepcopy"])
def test_resumed_is_uninterrupted(strategy: str, way: str) -> None:
    """Law: after any trace of overflows a run that resumed is the run that did not."""
    names = ["a", None, "a", "", "b", None, None, "b"]
    for seed in range(3):
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
                state = broken.scaler.state_dict()
                broken.scaler = ours(**numbers)
                broken.scaler.load_state_dict(
                    through_file(state) if way == "file" else state
                )
            elif way == "pickle":
                broken.scaler = pickle.loads(pickle.dumps(broken.scaler))  # noqa: S301
            else:
                broken.scaler = copy.deepcopy(broken.scaler)
            if way in {"pickle", "deepcopy"}:
                kept = broken.scaler.last_step, straight.scaler.last_step
                assert len({(str(report), report.found_inf_in) for report in kept}) == 1


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
    loop.scaler.load_state_dict(through_file(state))
    seen = [loop.scaler.get_scale()]
    for _ in range(2):
        loop.step(1.0)
        seen.append(loop.scaler.get_scale())
    # Two more clean steps make five, and the scale grows fourfold.
    assert seen == [32.0, 32.0, 128.0]


@pytest.mark.parametrize("make", [SGD, functools.partial(SGD, fused=True)])
@pytest.mark.parametrize("kind", ["made", "torch", "apex"])
@pytest.mark.parametrize("used", [False, True])
def test_a_scale_below_one(kind: str, used: bool, make: Any) -> None:
    """Law: unscaling that makes 1e38 * 1024 of 1e38 is seen in the first step, too.

    Whether the scaler was made with that scale or has loaded it.
    """
    states: dict[str, Any] = {"apex": {"loss_scale": 2.0**-10, "unskipped": 0}}
    states["torch"] = torch.amp.GradScaler("cpu", 2.0**-10).state_dict()
    loop = Loop(hs.GradScaler("cpu", **{"init_scale": 0.001} if kind == "made" else {}))
    loop.optimizer = make([loop.weight])
    if used:
        loop.step(1.0)
    before = loop.weight.detach().clone()
    if kind != "made":
        loop.scaler.load_state_dict(states[kind])
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.weight.sum()).backward()
    loop.weight.grad = torch.full((4,), 1e38)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.skipped
    same(loop.weight.detach(), before)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("used", [False, True])
def test_a_missing_field(field: str, used: bool) -> None:
    """Law: it is refused by name, and nothing of the state is taken in."""
    loop, fresh = Loop(ours()), Loop(ours())
    for value in TRACE:
        loop.step(value)
    loop.step(1.0, "aux")
    if used:
        fresh.step(1.0)
        fresh.step(1.0, "aux")
    before, state = fresh.scaler.state_dict(), loop.scaler.state_dict()
    del state["_halfstep"]["aux"][field]
    with pytest.raises(UserError) as caught:
        fresh.scaler.load_state_dict(state)
    said = (
        f"loss-scale state has no '{field}'; it holds {[*state['_halfstep']['aux']]}."
    )
    assert str(caught.value) == said
    assert fresh.scaler.state_dict() == before


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, "missing") for field in ("applied", "begun", "history", "in_a_row")),
        *(("applied", -1), ("applied", 1.5), ("begun", None), ("in_a_row", "2")),
        *(("history", 3), ("history", [0.0]), ("history", [INF])),
    ],
)
def test_a_broken_memory(field: str, value: object) -> None:
    """Law: what is remembered of the steps is whole and of its type, or refused."""
    scaler = LossScaler(ScaleRule())
    before, state = scaler.state_dict(), scaler.state_dict()
    state["watch"] |= {"applied": 2, "begun": True, "history": [8.0], "in_a_row": 1}
    words = rf"^watch\['{field}'\]="
    if value == "missing":
        del state["watch"][field]
        words = f"^loss-scale state's 'watch' .* {field!r};"
    else:
        state["watch"][field] = value
    with pytest.raises(UserError, match=words) as caught:
        scaler.load_state_dict(state)
    assert len(str(caught.value).split()) <= 35
    assert scaler.state_dict() == before

"""States of every level and form of masters, loaded into every other."""

import copy
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from portable import (
    KINDS,
    OPTIMIZERS,
    bits,
    build,
    net,
    train,
)
from small_training import same
from torch import Tensor, nn

import halfstep as hs
from halfstep import UserError
from halfstep.checkpoint import single
from halfstep.session.session import Session

LEAN = ("split", "kahan", "stochastic")
LOW = (torch.bfloat16, torch.float16)


@functools.cache
def saved(kind: str, name: str) -> dict[str, Any]:
    session = build(kind, name)
    train(session, 0, 1, 2)
    return copy.deepcopy(session.state_dict())


def held_in(session: Session, weight: Tensor) -> torch.dtype:
    """Return what the moments of one of the model's weights are to be kept in.

    By hand: 16-bit weights without masters, and those whose form has bf16 moments.
    """
    form, low = session.state_dict()["masters"]["form"], weight.dtype in LOW
    if low and form in ("kahan", "stochastic", "none"):
        return weight.dtype
    return torch.float32


def expected(truth: Tensor, stored: Tensor, form: str) -> Tensor:
    exact = form in ("fp32", "split") or stored.dtype not in LOW
    if exact or not truth.is_floating_point():
        return truth
    high = truth.to(stored.dtype)
    if form == "kahan":
        # Rounded twice, by torch: the weight, and what it lacks.
        return high.float() + (truth - high.float()).to(torch.bfloat16).float()
    return high.float()


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_any_to_any(source: str, target: str) -> None:
    """Law: weights, moments and counters arrive as exactly as the target can hold."""
    name = [*OPTIMIZERS][(KINDS.index(source) + KINDS.index(target)) % 2]
    state = copy.deepcopy(saved(source, name))
    session = build(target, name, seed=1)
    train(session, 7)
    session.load_state_dict(copy.deepcopy(state))
    form = session.state_dict()["masters"]["form"]
    stored = dict(session.model.state_dict(keep_vars=True))
    weights = session.weights()
    assert weights.keys() == state["weights"].keys()
    for key, truth in state["weights"].items():
        assert truth.dtype not in LOW
        resumes = source == target == "O2 bf16 kahan"
        right = truth if resumes else expected(truth, stored[key], form)
        assert same(weights[key], right), key
        if stored[key].dtype in LOW and not resumes and form != "split":
            assert torch.equal(stored[key], truth.to(stored[key].dtype)), key
    params = dict(session.model.named_parameters())
    moments = session.optimizer.state_dict()["state"]
    assert moments.keys() == state["optimizer"]["state"].keys()
    for number, key in enumerate(state["parameters"]):
        kept = held_in(session, params[key])
        for word, value in state["optimizer"]["state"][number].items():
            arrived = moments[number][word]
            if word == "step":
                assert same(arrived, torch.tensor(3.0))
            else:
                assert same(arrived, value.to(kept)), (key, word)
    assert session.steps_applied == 3
    clock = [session.state_dict()["masters"][key] for key in ("seed", "step")]
    assert clock == [state["masters"][key] for key in ("seed", "step")] == [0, 3]
    same_dtype = source.split()[1] == target.split()[1]
    assert not same_dtype or session.state_dict()["scaler"] == state["scaler"]
    assert all(loss < 10 for loss in train(session, 3))


def test_loading_ends_an_unfinished_window() -> None:
    """Law: a loaded session holds no half-accumulated gradient of before."""
    used, fresh = (build("O2 bf16 fp32", "sgd", accumulate=2) for _ in range(2))
    state = copy.deepcopy(fresh.state_dict())
    train(used, 0)
    used.load_state_dict(state)
    for session in (used, fresh):
        train(session, 1, 2)
    assert same(used.weights(), fresh.weights())


@pytest.mark.parametrize("form", LEAN)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_own_state(form: str, name: str) -> None:
    """Law: moments loaded into the optimizer itself end in the form's dtype.

    torch casts them to fp32, the dtype of masters.
    """
    other, session = build("O2 bf16 fp32", name), build(f"O2 bf16 {form}", name)
    train(other, 0, 1)
    state = copy.deepcopy(other.optimizer.state_dict())
    session.optimizer.load_state_dict(copy.deepcopy(state))
    params = dict(session.model.named_parameters())
    for number, key in enumerate(session.state_dict()["parameters"]):
        kept = held_in(session, params[key])
        for word, value in session.optimizer.state_dict()["state"][number].items():
            right = state["state"][number][word]
            assert same(value, right if word == "step" else right.to(kept))
    train(session, 2)
    for number, key in enumerate(session.state_dict()["parameters"]):
        moments = session.optimizer.state_dict()["state"][number]
        words = [word for word in moments if word != "step"]
        assert {moments[w].dtype for w in words} == {held_in(session, params[key])}


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_loads_anywhere(kind: str, tmp_path: Path) -> None:
    """Law: weights are fp32, fit a plain model strictly, and pass by safetensors."""
    from safetensors.torch import load_model

    session = build(kind, "adamw")
    train(session, 0, 1)
    weights = session.weights()
    assert not any(tensor.dtype in LOW for tensor in weights.values())
    assert weights["again.weight"] is weights["tied.weight"]
    plain = net(seed=1)
    plain.load_state_dict(weights, strict=True)
    assert same(dict(plain.state_dict()), weights)
    single.save(tmp_path / "at", weights, {}, {})
    other = net(seed=2)
    missing, unexpected = load_model(other, tmp_path / "at" / single.WEIGHTS)
    assert (missing, unexpected) == (set(), [])
    assert same(dict(other.state_dict()), weights)
    again = single.load(tmp_path / "at").weights
    assert same({key: again[key] for key in weights}, weights)


# States that do not fit, refused by name before anything of them is taken in

TARGETS = (
    "O0 fp32 fp32",
    "O2 bf16 fp32",
    "O2 bf16 split",
    "O2 bf16 kahan",
    "O3 bf16 fp32",
)


def _two_groups(state: dict[str, Any]) -> None:
    (group,) = state["optimizer"]["param_groups"]
    first, rest = group["params"][:1], group["params"][1:]
    halves = [group | {"params": first}, group | {"params": rest}]
    state["optimizer"]["param_groups"] = halves


def _of_sgd(state: dict[str, Any]) -> None:
    other = OPTIMIZERS["sgd"](net().parameters()).state_dict()
    state["optimizer"]["param_groups"] = other["param_groups"]


COUNTER, FIRST = "batch.num_batches_tracked", "first.weight"
HARMS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (
        lambda s: s.update(version=4),
        "session state has version 4; this halfstep reads version 3.",
    ),
    "no version": (
        lambda s: s.pop("version"),
        "this is not the state of a session. Load ",
    ),
    "no scaler": (lambda s: s.pop("scaler"), "session state has no 'scaler'; "),
    "no clock": (
        lambda s: s["masters"].pop("step"),
        "session state has no 'masters.step'; it holds ['form', 'seed', 'low'].",
    ),
    "a seed in words": (
        lambda s: s["masters"].update(seed="two"),
        "masters.seed of the state is of type str; it must be an int.",
    ),
    "no number of skips": (
        lambda s: s["steps"].update(skipped=None),
        "steps.skipped of the state is of type NoneType; ",
    ),
    "half a schedule": (
        lambda s: s.update(schedule={"followed": 3}),
        "session state has no 'schedule.state'; it holds ['followed'].",
    ),
    "half a scale": (lambda s: s["scaler"].pop("scale"), "has no 'scale'"),
    "no scale": (lambda s: s["scaler"].update(scale=math.nan), "scale=nan must be "),
    "no watch": (
        lambda s: s["scaler"].update(watch=None),
        "'watch' is of type NoneType",
    ),
    "a weight less": (
        lambda s: s["weights"].pop("last.bias"),
        "weight 'last.bias': the state holds nothing, the session torch.",
    ),
    "a weight more": (
        lambda s: s["weights"].update(more=torch.ones(2)),
        "weight 'more': the state holds torch.float32 (2,), the session nothing; ",
    ),
    "another shape": (
        lambda s: s["weights"].update({"last.bias": torch.ones(4)}),
        "weight 'last.bias': the state holds torch.float32 (4,), the session torch.",
    ),
    "another kind": (
        lambda s: s["weights"].update({COUNTER: torch.tensor(1.5)}),
        "weight 'batch.num_batches_tracked': the state holds torch.float32 (), the ",
    ),
    "other groups": (
        _two_groups,
        "the state's optimizer has groups of [1, 12] parameters, this one of [13]; ",
    ),
    "another order": (
        lambda s: s["parameters"].update({FIRST: s["parameters"].pop(FIRST)}),
        "the state's optimizer holds 'first.bias' where this one holds 'first.weight'",
    ),
    "a name less": (
        lambda s: s["parameters"].popitem(),
        "the state's optimizer holds None where this one holds 'last.bias'; ",
    ),
    "another optimizer": (
        _of_sgd,
        "'momentum', 'nesterov'] and no ['amsgrad', 'betas', ",
    ),
    "moments of another shape": (
        lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.ones(5)),
        "'exp_avg' of parameter 0 has shape (5,), the parameter (16, 6); ",
    ),
    "moments gone": (
        lambda s: s["optimizer"].update(state={}),
        "the state was saved with moments of 13 parameters, and holds those of 0. ",
    ),
}


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("harm", HARMS)
def test_refused_whole(harm: str, turn: int) -> None:
    """Law: what cannot be loaded is named, and leaves everything as it was."""
    change, words = HARMS[harm]
    kind = TARGETS[([*HARMS].index(harm) + turn) % len(TARGETS)]
    other, session = build("O2 bf16 fp32", "adamw"), build(kind, "adamw", seed=1)
    train(other, 0, 1, 2)
    train(session, 3)
    state = copy.deepcopy(other.state_dict())
    session.load_state_dict(copy.deepcopy(state))  # the unharmed twin
    before = copy.deepcopy(bits(session))
    train(other, 4)
    state = copy.deepcopy(other.state_dict())
    change(state)
    with pytest.raises(UserError) as caught:
        session.load_state_dict(state)
    assert words in str(caught.value)
    assert same(bits(session), before)


class Remembers(nn.Linear):
    """Has state of its own, a word or a tensor."""

    kept: Any = "nothing yet"

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("kept", ["a word", torch.arange(3)], ids=["word", "tensor"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_modules_remember(level: str, kept: Any) -> None:
    """Law: what a module gives by `get_extra_state` is saved, and given back."""
    sessions = []
    for value in (kept, copy.deepcopy(kept) * 2):
        model = nn.Sequential(Remembers(2, 2))
        model[0].kept = value
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sessions.append(hs.prepare(model, optimizer, level))
    first, second = sessions
    second.load_state_dict(first.state_dict())
    assert same(second.model[0].kept, kept)
    plain = nn.Sequential(nn.Linear(2, 2))
    bare = hs.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), "O0")
    with pytest.raises(UserError, match=r"'0\._extra_state' is in the state alone"):
        bare.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"'0\._extra_state' is in the model alone"):
        first.load_state_dict(bare.state_dict())


def refuse(*_: object) -> None:
    message = "not today"
    raise ValueError(message)


@pytest.mark.parametrize("form", ["fp32", "split", "kahan", "stochastic"])
@pytest.mark.parametrize("who", ["schedule", "module", "optimizer", "another schedule"])
def test_loading_that_raises(form: str, who: str) -> None:
    """Law: whoever rejects a state, all is as it was, and training goes on alike."""

    def start(seed: int, *rates: float) -> Session:
        model = nn.Sequential(net(seed), Remembers(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, r) for r in rates]
        after = list(range(1, len(rates)))
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, after)
        return hs.prepare(
            *(model, optimizer, "O2"), dtype="bf16", master=form, scheduler=schedule
        )

    def go(session: Session) -> None:
        with session.autocast():
            loss = sum(p.float().sum() for p in session.model.parameters())
        session.backward(loss)
        session.step()

    other = start(2, 0.5, 0.2, 0.1)
    session, twin = (
        start(1, *((0.5, 0.2) + (0.1,) * (who != "schedule"))) for _ in "12"
    )
    for each in (other, session, twin):
        each.model[1].kept = str(each is other)
        go(each)
    state = copy.deepcopy(other.state_dict())
    if who == "module":
        session.model[1].set_extra_state = refuse  # type: ignore[method-assign]
    elif who == "optimizer":
        session.optimizer.register_load_state_dict_post_hook(refuse)
    elif who == "another schedule":
        session.scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, 1)
        twin.scheduler = torch.optim.lr_scheduler.StepLR(twin.optimizer, 1)
    words = "not today|list index|another schedule than StepLR: it has .*_milestones"
    with pytest.raises((ValueError, IndexError), match=words):
        session.load_state_dict(state)
    for _ in range(2):
        assert same(*(copy.deepcopy(each.state_dict()) for each in (session, twin)))
        for each in (session, twin):
            go(each)


class Writing(torch.optim.lr_scheduler.StepLR):
    """Writes to the optimizer before it rejects a state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict
        self.optimizer.param_groups[0]["lr"] = 9.0
        refuse()


def test_loading_by_a_schedule_that_writes() -> None:
    """Law: if a schedule raises, what it has written to the groups is undone too."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    session = hs.prepare(model, optimizer, "O2", scheduler=Writing(optimizer, 1))
    before = copy.deepcopy(session.state_dict())
    with pytest.raises(ValueError, match="not today"):
        session.load_state_dict(before)
    assert same(copy.deepcopy(session.state_dict()), before)


def with_outside(kind: str, sizes: tuple[int, int] = (3, 64)) -> tuple[Session, Any]:
    """Return a session, and the parameters outside its model: in fp32 and 16 bits."""
    level, dtype, master = kind.split()
    model = net()
    low_dtype = LOW[dtype == "fp16"]
    low = nn.Parameter(torch.linspace(1, 2, sizes[1], dtype=low_dtype))
    outside = nn.Parameter(torch.ones(sizes[0])), low
    optimizer = OPTIMIZERS["adamw"]([outside[0], *model.parameters(), low])
    return hs.prepare(model, optimizer, level, dtype=dtype, master=master), outside


def train_outside(session: Session, outside: Any, step: int) -> None:
    with session.autocast():
        loss = session.model(torch.ones(2, 6)).float().mean()
        loss = loss + sum((p.float() * step / 4).sum() for p in outside)
    session.backward(loss)
    session.step()


@pytest.mark.parametrize("kind", [k for k in KINDS if "O0" not in k])
def test_parameters_outside_the_model(kind: str, tmp_path: Path) -> None:
    """Law: what the loss learns, as a temperature, is saved and resumed to the bit."""
    (session, outside), (other, loaded) = with_outside(kind), with_outside(kind)
    for step in (1, 2):
        train_outside(session, outside, step)
    state = copy.deepcopy(session.state_dict())
    assert ("14 of the optimizer" in state["masters"]["low"]) == ("kahan" in kind)
    hs.fsdp.save(session, tmp_path / "shards")
    rest = copy.deepcopy(state)
    single.save(tmp_path / "one", rest.pop("weights"), rest, {})
    train_outside(session, outside, 3)
    one = single.load(tmp_path / "one")
    for load in (
        lambda: other.load_state_dict(state),
        lambda: other.load_state_dict(one.state | {"weights": one.weights}),
        lambda: hs.fsdp.load(other, tmp_path / "shards"),
    ):
        load()
        assert same(other.state_dict(), state)
        assert not same(loaded[0].detach(), torch.ones(3))
        train_outside(other, loaded, 3)
        assert same(bits(other), bits(session))


def test_parameters_outside_the_model_that_do_not_fit() -> None:
    """Law: they are refused by name, and nothing of the state is taken."""
    session, _ = with_outside("O2 fp16 fp32")
    state = copy.deepcopy(session.state_dict())
    other, _ = with_outside("O2 fp16 fp32", (3, 5))
    words = "weight '14 of the optimizer': the state holds torch.float32 (64,), the "
    with pytest.raises(UserError, match=re.escape(words)):
        other.load_state_dict(state)
    plain = build("O2 fp16 fp32", "adamw")
    with pytest.raises(UserError, match=r"the state's optimizer has groups of \[15\]"):
        plain.load_state_dict(state)
    before = copy.deepcopy(bits(session))
    state["outside"]["14 of the optimizer"].fill_(1e6)
    with pytest.raises(UserError, match=r"14 of the optimizer"):
        session.load_state_dict(state)
    assert same(bits(session), before)

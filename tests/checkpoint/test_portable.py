"""States of every level and form of masters, loaded into every other."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from portable import (
    KINDS,
    OPTIMIZERS,
    bits,
    build,
    net,
    through_checkpoint,
    through_torch,
    train,
)
from small_training import one_thread, same
from torch import Tensor

from halfstep.checkpoint import single
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from halfstep.session.session import Session

LEAN = ("split", "kahan", "stochastic")
WAYS = (through_torch, through_checkpoint)
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the machine's speed out of these tests, and threads out of tiny products."""
    monkeypatch.setattr(hardware, "emulation_warning", lambda *_: None)
    with one_thread():
        yield


@functools.cache
def saved(kind: str, name: str) -> dict[str, Any]:
    """Return the state of a session that has trained three steps."""
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
    """Return a saved tensor as one that is stored so can hold it, in fp32."""
    exact = form in ("fp32", "split") or stored.dtype not in LOW
    if exact or not truth.is_floating_point():
        return truth
    high = truth.to(stored.dtype)
    if form == "kahan":
        # Rounded twice, by torch: the weight, and what it lacks.
        return high.float() + (truth - high.float()).to(torch.bfloat16).float()
    return high.float()


PAIRS = list(itertools.product(KINDS, KINDS))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_any_to_any(pair: tuple[str, str], name: str) -> None:
    """Law: weights, moments and counters arrive as exactly as the target can hold."""
    source, target = pair
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
    assert not same_dtype or session.state_dict()["scales"] == state["scales"]
    assert all(loss < 10 for loss in train(session, 3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_uninterrupted(
    kind: str, name: str, way: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Law: a session that loads a file goes on to the bit, and leaves the file's alone.

    With another network and moments of its own in the way.
    """
    straight, resumed = build(kind, name), build(kind, name, seed=1)
    train(straight, 0, 1, 2)
    train(resumed, 9)
    state = way(straight.state_dict(), tmp_path)
    before = copy.deepcopy(state)
    resumed.load_state_dict(state)
    assert same(bits(resumed), bits(straight))
    losses = [train(each, 3, 4, 5) for each in (straight, resumed)]
    assert losses[0] == losses[1]
    assert same(bits(resumed), bits(straight))
    assert same(state, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_and_back(name: str) -> None:
    """Law: fp32 to split to fp32 goes on as if it had never been away."""
    straight, there = build("O2 bf16 fp32", name), build("O2 bf16 split", name, seed=1)
    train(straight, 0, 1, 2)
    there.load_state_dict(straight.state_dict())
    back = build("O2 bf16 fp32", name, seed=2)
    back.load_state_dict(there.state_dict())
    first, last = straight.state_dict(), back.state_dict()
    assert same(last, first)
    assert train(back, 3, 4) == train(straight, 3, 4)
    assert same(bits(back), bits(straight))


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

"""States that do not fit, refused by name before anything of them is taken in."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from portable import OPTIMIZERS, bits, build, net, train
from small_training import one_thread, same
from torch import nn

import halfstep as hs
from halfstep import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = (
    "O0 fp32 fp32",
    "O2 bf16 fp32",
    "O2 bf16 split",
    "O2 bf16 kahan",
    "O3 bf16 fp32",
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the machine's speed out of these tests, and threads out of tiny products."""
    monkeypatch.setattr(hardware, "emulation_warning", lambda *_: None)
    with one_thread():
        yield


def _reorder(state: dict[str, Any]) -> None:
    first, *rest = state["parameters"].items()
    state["parameters"] = dict([*rest, first])


def _two_groups(state: dict[str, Any]) -> None:
    (group,) = state["optimizer"]["param_groups"]
    first, rest = group["params"][:1], group["params"][1:]
    halves = [group | {"params": first}, group | {"params": rest}]
    state["optimizer"]["param_groups"] = halves


def _of_sgd(state: dict[str, Any]) -> None:
    other = OPTIMIZERS["sgd"](net().parameters()).state_dict()
    state["optimizer"]["param_groups"] = other["param_groups"]


def _squeeze(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(5)


def _widen(state: dict[str, Any]) -> None:
    state["weights"]["batch.num_batches_tracked"] = torch.tensor(1.5)


HARMS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (
        lambda s: s.update(version=4),
        "session state has version 4; this halfstep reads version 3.",
    ),
    "no version": (lambda s: s.pop("version"), "session state has version None; "),
    "no scales": (lambda s: s.pop("scales"), "session state has no 'scales'; "),
    "no masters": (lambda s: s.pop("masters"), "session state has no 'masters'; "),
    "no clock": (
        lambda s: s["masters"].pop("step"),
        "session state has no 'masters.step'; it holds ['form', 'seed', 'low'].",
    ),
    "no counts": (
        lambda s: s["steps"].pop("skipped"),
        "session state has no 'steps.skipped'; it holds ['attempted'].",
    ),
    "half a schedule": (
        lambda s: s.update(schedule={"followed": 3}),
        "session state has no 'schedule.state'; it holds ['followed'].",
    ),
    "half a scale": (lambda s: s["scales"][""].pop("scale"), "has no 'scale'"),
    "a weight less": (
        lambda s: s["weights"].pop("last.bias"),
        "weight 'last.bias': the state holds nothing, the model shape (3,); ",
    ),
    "a weight more": (
        lambda s: s["weights"].update(more=torch.ones(2)),
        "weight 'more': the state holds shape (2,), the model nothing; ",
    ),
    "another shape": (
        lambda s: s["weights"].update({"last.bias": torch.ones(4)}),
        "weight 'last.bias': the state holds shape (4,), the model shape (3,); ",
    ),
    "another kind": (
        _widen,
        "weight 'batch.num_batches_tracked': the state holds torch.float32, the model ",
    ),
    "other groups": (
        _two_groups,
        "the state's optimizer has groups of [1, 12] parameters, this one of [13]; ",
    ),
    "another order": (
        _reorder,
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
        _squeeze,
        "'exp_avg' of parameter 0 has shape (5,), the parameter (16, 6); ",
    ),
    "moments gone": (
        lambda s: s["optimizer"].update(state={}),
        "the state was saved with moments of 13 parameters, and holds those of 0. ",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_refused_whole(kind: str, harm: str) -> None:
    """Law: what cannot be loaded is named, and leaves everything as it was."""
    change, words = HARMS[harm]
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


class Fussy(torch.optim.SGD):
    """Refuses what it is given."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse."""
        del state_dict
        message = "not today"
        raise ValueError(message)


@pytest.mark.parametrize("form", ["fp32", "split", "kahan", "stochastic"])
def test_an_optimizer_that_refuses(form: str) -> None:
    """Law: where the optimizer itself refuses, no weight has been loaded yet."""
    state = copy.deepcopy(build("O2 bf16 fp32", "sgd").state_dict())
    model = net(1)
    optimizer = Fussy(model.parameters(), lr=0.05, momentum=0.9)
    session = hs.prepare(model, optimizer, "O2", dtype="bf16", master=form)
    train(session, 0)
    before = copy.deepcopy(bits(session))
    with pytest.raises(ValueError, match="not today"):
        session.load_state_dict(state)
    assert same(bits(session), before)


class Remembers(nn.Linear):
    """Has state of its own, a word or a tensor."""

    kept: Any = "nothing yet"

    def get_extra_state(self) -> Any:
        """Return it."""
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
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

"""What `prepare` takes and what it refuses, in one line and before anything changes."""

import copy
import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.numerics.formats import BF16
from halfstep.policy import LEAN, levels
from halfstep.session.session import Session


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def one_step(session: Session) -> Any:
    for _ in range(session.accumulate):
        with session.autocast():
            loss = session.model(torch.ones(3, 4)).float().square().mean()
        session.backward(loss)
        report = session.step()
    assert report.complete
    return session.weights()


class Inherits(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Wrapper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


STEP_LR = torch.optim.lr_scheduler.StepLR
MUST = "it must be a torch.optim.Optimizer"
AROUND = "around SGD: a session scales and steps by itself"
PAIRS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    f"optimizer is of type dict; {MUST}.": lambda m, o: (m, {"all": o}),
    f"optimizer is the class SGD; {MUST}.": lambda m, _: (m, torch.optim.SGD),
    f"optimizer is of type list; {MUST}, or a list": lambda m, _: (m, []),
    "model is of type method; it must be an nn.Module.": lambda m, o: (m.forward, o),
    "model is of type list; it must be an nn.Module, or": lambda m, o: ([m, 3], [o]),
    "prepare was given the optimizer first: write prep": lambda m, o: (o, m),
    f"optimizer is of type Inherits, {AROUND}": lambda m, o: (m, Inherits(o)),
    f"optimizer is of type Wrapper, {AROUND}": lambda m, o: (m, Wrapper(o)),
    "the optimizer given is a scheduler, StepLR": lambda m, o: (m, STEP_LR(o, 1)),
    "the SGD holds none of the model's parameters": lambda m, _: (m, sgd(network())),
    "a parameter is in two of the optimizers": lambda m, o: (m, [o, sgd(m)]),
    "LBFGS evaluates the model inside its step; use": lambda m, _: (m, _lbfgs(m)),
    "LBFGS evaluates the model": lambda m, o: (
        *([m, (n := network())], [o, _lbfgs(n)]),
    ),
}
"""How the message begins -> what `prepare` is given."""


JUNK: dict[str, Any] = {
    "empty": "",
    "lines": "a\nb",
    "none": None,
    "true": True,
    "float": 1.5,
    "nan": math.nan,
    "huge": 10**5000,
    "list": [],
    "dict": {},
    "object": object(),
    "tensor": torch.tensor([1, 2]),
    "decimal": Decimal(2),
}
NAMES: list[Any] = ["ab", {"a": 1}, [1], ["ab"], [("a", 1)], [(1, 2, 3)]]
WRONG: dict[str, tuple[str, list[Any]]] = {
    "level": ("", ["o1", 0, torch.int8, "\udcff"]),
    "dtype": ("", ["o1", 0, torch.int8, "\udcff"]),
    "master": ("", ["2", 0]),
    "policy": ("", ["lean +", "lean + op:x", "lean + a:b=c", "none.toml", "."]),
    "loss_scale": ("float decimal", ["nan", "inf", "-1", "0", 0, math.inf]),
    "clip_grad_norm": ("none float", [0, -math.inf, False, torch.tensor(1.0)]),
    "accumulate": ("", [0, -1, 2.0, np.float32(2), np.True_, torch.tensor(2.0)]),
    "optimizer_in_backward": ("true", ["no", 0, 1, torch.tensor(1)]),
    "scheduler": ("none", [STEP_LR, "StepLR"]),
    "named_parameters": ("none empty list dict", NAMES),
    "process_group": ("none", ["gloo", 0, False]),
}
"""Parameter -> junk that is right there, and more that is wrong."""


def wrong_values(name: str) -> list[Any]:
    right, more = WRONG[name]
    return [*(v for k, v in JUNK.items() if k not in right.split()), *more]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    """Law: each is refused in one line that names the parameter; nothing changes."""
    for value in wrong_values(name):
        model = network()
        optimizer = sgd(model)
        model(torch.ones(1, 4)).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), gradients))
        given = {"level": "O2", "dtype": "bf16"} | {name: value}
        with pytest.raises(UserError) as caught:
            hs.prepare(model, optimizer, **given)
        message = str(caught.value)
        assert name in message or name == "policy"
        assert len(message.splitlines()) == 1
        assert len(message.split()) <= 35
        assert len(message) < 300
        assert " at 0x" not in message
        left = [p.grad for p in model.parameters() if p.grad is not None]
        after = model.state_dict(), optimizer.state_dict(), left
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert not any(module._forward_hooks for module in model.modules())
        hs.prepare(model, optimizer, "O2", dtype="bf16")


SAID: dict[str, dict[str, Any]] = {
    "accumulate=0 must be a whole number of at least 1.": {"accumulate": 0},
    "clip_grad_norm=0.0 must be a number above 0, or None.": {"clip_grad_norm": 0.0},
    "master='half' is not a form of master weights; choose": {"master": "half"},
    "level=O2 needs dtype bf16 or fp16": {"level": "O2", "dtype": "fp32"},
    "policy='leaner' is not known; the named policies": {"policy": "leaner"},
    "prepare() has no argument 'grad_scaler': did you mean loss_scale": {
        "grad_scaler": 1
    },
    "prepare() has no argument 'grad_clip': did you mean clip_grad_norm": {
        "grad_clip": 1
    },
    "prepare() has no argument 'colour': choose from model, optimizer,": {"colour": 1},
}
"""How the message begins -> arguments."""


@pytest.mark.parametrize("message", [*PAIRS, *SAID])
def test_messages(message: str) -> None:
    """Law: what does not fit is named, value or argument, and what would be right."""
    model = network()
    pair = PAIRS.get(message, lambda *both: both)(model, sgd(model))
    with pytest.raises(UserError) as caught:
        hs.prepare(*pair, **{"level": "O2", "dtype": "bf16"} | SAID.get(message, {}))
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).split()) <= 35


RIGHT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"accumulate": np.int64(2)}, {"accumulate": 2}),
    ({"accumulate": torch.tensor(2)}, {"accumulate": 2}),
    ({"clip_grad_norm": np.float32(0.5)}, {"clip_grad_norm": 0.5}),
    ({"clip_grad_norm": 1}, {"clip_grad_norm": 1.0}),
    ({"clip_grad_norm": math.inf}, {}),
    ({"loss_scale": np.float64(4)}, {"loss_scale": "4"}),
    ({"loss_scale": 1}, {"loss_scale": "none"}),
    ({"policy": LEAN}, {"policy": "lean"}),
    ({"level": levels.O2}, {"level": "O2"}),
    ({"dtype": BF16}, {"dtype": torch.bfloat16}),
    ({"named_parameters": ()}, {}),
]


@pytest.mark.parametrize(("one", "other"), RIGHT)
def test_ways_to_say_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Law: values at the edge, and other libraries' numbers, mean what they say."""
    plain: dict[str, Any] = {"level": "O2", "dtype": "bf16"}
    models = network(), network()
    both = [
        one_step(hs.prepare(model, sgd(model), **plain | given))
        for model, given in zip(models, (one, other), strict=True)
    ]
    torch.testing.assert_close(*both, rtol=0, atol=0)


def test_schedulers_that_do_not_fit() -> None:
    """Law: one that needs a metric, or steps another optimizer, is refused."""
    model = network()
    optimizer, other = sgd(model), sgd(model)
    scheduling = torch.optim.lr_scheduler
    plateau = scheduling.ReduceLROnPlateau(optimizer)
    with pytest.raises(UserError, match=r"^scheduler is a ReduceLROnPlateau, which "):
        hs.prepare(model, optimizer, "O0", scheduler=plateau)
    session = hs.prepare(model, optimizer, "O0")
    with pytest.raises(UserError, match=r"^the StepLR belongs to another optimizer "):
        session.scheduler = scheduling.StepLR(other, 1)
    with pytest.raises(UserError, match=r"^scheduler is of type int; it must be "):
        session.scheduler = 3  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"^clip_grad_norm='1' must be "):
        session.clip_grad_norm = "1"  # type: ignore[assignment]
    session.scheduler = scheduling.StepLR(optimizer, 1)


def test_prepared_twice() -> None:
    """Law: neither a model, nor one around it, nor an optimizer is prepared again."""
    model = network()
    optimizer = sgd(model)
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")
    outer = nn.Sequential(nn.Linear(4, 4), model)
    other = network()
    more = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.05)
    for module, stepper, what in (
        (model, optimizer, "the optimizer"),
        (model, sgd(model), "the model"),
        (outer, sgd(outer), "module '1'"),
        (other, optimizer, "the optimizer"),
    ):
        with pytest.raises(UserError, match=f"^{what} was prepared before, at O1 bf16"):
            hs.prepare(module, stepper, "O2")
    # What was refused, or only shares weights, may be prepared; the first goes on.
    hs.prepare(other, more, "O1", dtype="bf16")
    one_step(session)
    twin = copy.deepcopy(outer)
    hs.prepare(twin, sgd(twin), "O1", dtype="bf16")


def test_o0_takes_any_dtype() -> None:
    """Law: O0 trains in fp32, and says once that the dtype has no effect."""
    model, twin = network(), network()
    with pytest.warns(UserWarning, match=r"has no effect") as caught:
        session = hs.prepare(model, sgd(model), "O0", dtype="fp16")
    reason = "level O0 was asked for; dtype=fp16 has no effect: O0 is fp32 throughout"
    assert [str(warning.message) for warning in caught] == [reason]
    assert session.choice.reason == reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = hs.prepare(twin, sgd(twin), "O0", dtype="fp32")
    both = one_step(session), one_step(plain)
    torch.testing.assert_close(*both, rtol=0, atol=0)


def test_a_model_that_came_in_16_bits() -> None:
    """Law: O0 and O1 refuse it, unless it is frozen."""
    for level in ("O0", "O1"):
        model = network().half()
        words = f"^level={level} trains fp32 weights, and '0.weight' is fp16: call mod"
        with pytest.raises(UserError, match=words):
            hs.prepare(model, sgd(model), level)
    adapted = network().bfloat16()
    adapted[2].float()
    adapted[:2].requires_grad_(requires_grad=False)
    session = hs.prepare(adapted, sgd(adapted), "O1", dtype="bf16")
    one_step(session)
    assert adapted[0].weight.dtype == torch.bfloat16


def test_a_part_of_what_was_prepared() -> None:
    """Law: nor is a part prepared again; one without weights may be shared."""
    model = network()
    hs.prepare(model, sgd(model), "O2", dtype="bf16")
    part = nn.Sequential(model[0])
    with pytest.raises(UserError, match=r"^module '0' was prepared before, at "):
        hs.prepare(part, sgd(part), "O2", dtype="bf16")
    shared = nn.GELU()
    for _ in range(2):
        other = nn.Sequential(nn.Linear(2, 2), shared)
        hs.prepare(other, sgd(other), "O2", dtype="bf16")


def test_a_refused_model_keeps_its_gradients() -> None:
    """Law: weights beyond fp16 are refused, and gradients are as they were."""
    model = network()
    model(torch.ones(3, 4)).sum().backward()
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6
    with pytest.raises(UserError):
        hs.prepare(model, sgd(model), "O2", dtype="fp16")
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("loss", [1.0, None, {"loss": torch.ones(())}])
def test_a_loss_that_is_no_tensor(loss: Any) -> None:
    """Law: `loss.item()` and the like are refused with what would be right."""
    model = network()
    session = hs.prepare(model, sgd(model), "O0")
    with pytest.raises(UserError, match=r"^loss is of type \w+; it must be a Tensor"):
        session.backward(loss)

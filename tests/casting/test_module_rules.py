"""Rules on modules: what runs inside them runs as the rule says, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from units import Seen, Unit

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.policy import Policy, decide

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.linspace(-1, 1, 8).view(2, 4)


class Special(Unit):
    """A class of its own."""


def build() -> tuple[Any, Seen]:
    """Return a tree of units, and what they take down: a, a.b, a.b.c, a.d, e."""
    seen: Seen = []
    leaf = Special("a.b.c", seen)
    inner = Unit("a.b", seen, c=leaf)
    outer = Unit("a", seen, b=inner, d=Unit("a.d", seen))
    return Unit("", seen, a=outer, e=Unit("e", seen)), seen


TYPES = {"a.b.c": ("Special", "Unit"), "": ("Unit",)}


def run(policy: str, low: torch.dtype = BF16) -> Seen:
    """Run the tree under a policy; return what it took down."""
    model, seen = build()
    with autocast("cpu", low, policy=policy, model=model):
        model(X)
    assert not torch.is_autocast_enabled("cpu")
    assert active_context.active("cpu") is None
    return seen


PLACES = ("", "a", "a.b", "a.b.c", "a.d", "e")


def planned(policy: str, low: torch.dtype = BF16) -> Seen:
    """Return what `decide` says of the tree."""
    parsed = Policy.parse(policy)
    found: Seen = []
    for place in PLACES:
        types = [
            name
            for outer in PLACES
            if (place + ".").startswith(outer + ".") or not outer
            for name in TYPES.get(outer, ("Unit",))
        ]
        dtypes: list[torch.dtype] = []
        given = FP32
        inside = parsed.rules and decide(
            None, (FP32,), "cpu", policy=parsed, low=low, module=place, types=types
        )
        if inside and inside.category == "low":
            given = low
        for op in ("mm", "mse_loss"):
            decision = decide(
                op,
                (given, FP32) if op == "mm" else (dtypes[0],) * 2,
                "cpu",
                policy=parsed,
                low=low,
                module=place,
                types=types,
            )
            as_called = dtypes[0] if dtypes else given
            dtypes.append(decision.dtype or as_called)
        found.append((place, dtypes[0], dtypes[1]))
    return found


POLICIES = [
    "module:a=fp32",
    "module:a.b=fp32",
    "module:a.b=promote",
    "module:a=keep",
    "module:a.?=fp32",
    "module:/a\\.[bd]/=fp32",
    "module:/.*c/=low",
    "type:Special=fp32",
    "type:Unit=fp32",
    "module:/.*/=fp32",
    # The first that matches decides, module by module and operation by operation.
    "module:a=fp32 + module:a.b=low",
    "module:a.b.c=fp32 + module:a.b=low + module:a=keep",
    "module:a.d=promote + module:*=fp32",
    "module:a.b=keep + module:a=low",
    "op:mm=fp32 + module:a=low",
    "op:mse_loss=keep + module:a.b=low + op:mm=promote",
    "module:a.b=fp32 + op:mm=fp32 + module:a=low",
]


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("base", ["torch", "lean"])
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("rules", POLICIES)
def test_rules_decide(rules: str, low: torch.dtype, base: str) -> None:
    """Law: each operation in each module runs as `decide` says; first match wins."""
    policy = f"{base} + {rules}"
    assert run(policy, low) == planned(policy, low)


def test_banned() -> None:
    """Law: a module that is banned raises when it is called, and leaves all as it was.

    Another one does not.
    """
    model, seen = build()
    region = autocast("cpu", policy="torch + module:a.d=banned", model=model)
    for _ in range(2):
        with region, pytest.raises(RuntimeError) as caught:
            model(X)
        assert str(caught.value) == (
            "module 'a.d' is banned by the rule 'module:a.d=banned', and was called."
        )
    assert [name for name, *_ in seen] == ["", "a", "a.b", "a.b.c"] * 2
    with region:
        model.e(X)
        assert seen[-1] == ("e", BF16, FP32)
    model(X)


def test_attached_once() -> None:
    """Law: regions without end, with equal policies, hook a module once.

    A module inside has a hook where another rule decides than around it, and only then.
    """
    model, _ = build()
    for word in ("torch + module:a=fp32", "lean + type:Special=low + type:Unit=fp32"):
        for _ in range(3):
            autocast("cpu", policy=word, model=model)
    hooks = {module.name: len(module._forward_pre_hooks) for module in model.modules()}
    assert hooks == {"": 1, "a": 1, "a.b": 0, "a.b.c": 1, "a.d": 0, "e": 0}


@pytest.mark.filterwarnings("ignore:policy rule")
def test_inactive_elsewhere() -> None:
    """Law: outside regions, in torch's, under another policy, with autocast off: none.

    Twin: under its own policy it acts.
    """
    model, seen = build()
    own = autocast("cpu", policy="torch + module:e=fp32", model=model)
    others: list[Any] = [
        autocast("cpu"),
        torch.autocast("cpu"),
        autocast("cpu", policy="lean"),
        autocast("cpu", policy="torch + op:erfinv=low"),
    ]
    for region in others:
        with region:
            model.e(X)
    model.e(X)
    low = autocast("cpu", policy="torch + module:e=low", model=model)
    with low, torch.autocast("cpu", enabled=False):
        model.e(X)
    assert [item[1] for item in seen] == [BF16] * 4 + [FP32] * 2
    seen.clear()
    with own:
        model.e(X)
        with autocast("cpu", policy="torch + op:erfinv=low"):
            model.e(X)
        with autocast("cpu"):
            model.e(X)
        with autocast("cpu", policy="torch"):
            model.e(X)
    assert [item[1] for item in seen] == [FP32, BF16, FP32, BF16]


def test_arguments_are_cast() -> None:
    """Law: fp32 and low cast what goes in, nested and by name; others leave it."""
    seen: dict[str, list[torch.dtype]] = {}

    class Take(nn.Module):
        def forward(self, x: Tensor, *, more: dict[str, list[Tensor]]) -> Tensor:
            found = x, more["a"][0], more["a"][1]
            seen[self.word] = [tensor.dtype for tensor in found]  # type: ignore[index]
            return x

    given = {"a": [torch.ones(1, dtype=BF16), torch.ones(1, dtype=torch.int32)]}
    for word in ("fp32", "low", "keep", "promote"):
        model = nn.Sequential(Take())
        model[0].word = word  # type: ignore[assignment]
        with autocast("cpu", policy=f"torch + module:0={word}", model=model):
            model[0](X, more=given)
    assert seen == {
        "fp32": [FP32, FP32, torch.int32],
        "low": [BF16, BF16, torch.int32],
        "keep": [FP32, BF16, torch.int32],
        "promote": [FP32, BF16, torch.int32],
    }


def test_a_module_without_tensors() -> None:
    """Law: a rule acts on a module that has no weight and is given no tensor."""

    class Make(nn.Module):
        def forward(self) -> Tensor:
            return torch.mm(X, X.T)

    model = nn.Sequential(Make())
    with autocast("cpu", policy="torch + module:0=fp32", model=model):
        assert model[0]().dtype == FP32

"""Eager regions: torch's own state, entered and left in any way."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import autocast_state

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError
from halfstep.policy import LEAN, Policy

KINDS = {
    "default": {},
    "torch": {"policy": "torch"},
    "lean": {"policy": "lean"},
    "rule": {"policy": "torch + op:mm=fp32"},
    "cache": {"cache": CastCache()},
    "record": {"record": True},
}
"""What a region may be asked for beyond torch's arguments."""
BOTH = pytest.mark.parametrize("kind", KINDS)
PLAIN = ("default", "torch")

OFF = (False, torch.bfloat16, True, 0)


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no rule of these tests be missed: they run hardly an operation."""
    monkeypatch.setattr(
        "halfstep.casting.dispatch_table.unmatched_rule_warning", lambda _: ""
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_sees_the_region(dtype: torch.dtype, kind: str) -> None:
    """Law: inside, torch's own state says on, dtype and cache; after, as before."""
    assert autocast_state() == OFF
    with autocast("cpu", dtype, cache_enabled=False, **KINDS[kind]):
        assert autocast_state() == (True, dtype, False, 1)
        with autocast("cpu", enabled=False, **KINDS[kind]):
            # The dtype is that of the moment when the instance is made.
            assert autocast_state() == (False, dtype, False, 2)
        assert autocast_state() == (True, dtype, False, 1)
    assert autocast_state() == OFF
    assert active_context.active("cpu") is None


@BOTH
def test_what_a_region_is(kind: str) -> None:
    """Law: one under torch's table is torch's class; one that is steered is not.

    torch.compile takes any instance of torch's class for one, and would leave a policy
    out.
    """
    region = autocast("cpu", **KINDS[kind])
    assert isinstance(region, torch.autocast) == (kind in PLAIN)
    with region as entered:
        assert entered is region


@pytest.mark.parametrize(
    ("given", "held"),
    [(None, None), ("torch", Policy()), (Policy(), Policy()), (LEAN, LEAN)],
)
def test_a_region_says_its_policy(
    given: Policy | str | None, held: Policy | None
) -> None:
    """Law: `policy` is what was asked for, parsed; None where nothing was."""
    assert autocast("cpu", policy=given).policy == held


# torch's arguments and answers


def test_signature_begins_with_torchs() -> None:
    """Law: names, order, defaults and kinds of torch's; ours need their names."""
    theirs = inspect.signature(torch.autocast).parameters.values()
    ours = list(inspect.signature(autocast).parameters.values())
    plain = [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in ours[: len(plain)]] == plain
    assert len(plain) == 4
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(plain) :])


def answers(make: Callable[..., Any], *args: Any) -> tuple[type | None, list[str]]:
    """Return the class of the error, its text, and the texts of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        texts = []
        try:
            with make(*args):
                texts.append(str(autocast_state(args[0])))
        except Exception as raised:  # noqa: BLE001 -- any is compared
            error = type(raised)
            texts.append(str(raised))
    return error, texts + [f"{w.category} {w.message}" for w in caught]


WRONG: list[tuple[Any, ...]] = [
    (torch.device("cpu"),),
    (1, torch.bfloat16),
    ("banana",),
    ("meta",),
    ("meta", torch.bfloat16),
    ("cpu", torch.float32),
    ("xpu", torch.float32),
    ("cpu", torch.float32, False),
    ("hpu",),
    *([] if torch.cuda.is_available() else [("cuda",)]),
]


@pytest.mark.parametrize("args", WRONG, ids=str)
def test_wrong_arguments_get_torchs_answer(args: tuple[Any, ...]) -> None:
    """Law: errors and warnings have torch's class and text, and leave torch's state."""
    expected = answers(torch.autocast, *args)
    for policy in (None, "torch"):

        def make(*given: Any, policy: str | None = policy) -> Any:
            return autocast(*given, policy=policy)

        assert answers(make, *args) == expected
    assert autocast_state() == OFF


def test_a_decorator_needs_a_function() -> None:
    """Law: a value that is none is named."""
    with pytest.raises(TypeError, match="needs a function, not 7"):
        autocast("cpu", policy="lean")(7)  # type: ignore[arg-type]


@BOTH
def test_a_decorated_generator_is_warned_of(kind: str) -> None:
    """Law: what runs its body after the call is told so; torch says nothing."""

    def batches() -> Any:
        yield torch.ones(2, 2) @ torch.ones(2, 2)

    async def predict() -> None:
        pass

    for function in (batches, predict):
        with pytest.warns(UserWarning, match=rf"effect in {function.__name__}, a ge"):
            autocast("cpu", torch.bfloat16, **KINDS[kind])(function)
        autocast("cpu", torch.bfloat16, enabled=False, **KINDS[kind])(function)


@BOTH
def test_a_decorated_function_keeps_its_name(kind: str) -> None:
    """Law: a decorated function is the same function inside a region."""
    region: Any = autocast("cpu", torch.float16, **KINDS[kind])

    def named(left: int, *, right: int) -> tuple[int, object]:
        """Say so."""
        return left + right, autocast_state()[:2]

    inside = region(named)
    assert (inside.__name__, inside.__doc__) == ("named", "Say so.")
    assert inside(2, right=3) == (5, (True, torch.float16))
    assert autocast_state() == OFF


@pytest.mark.parametrize("kind", ["lean", "record", "cache"])
def test_a_device_without_a_table_is_refused(kind: str) -> None:
    """Law: what needs a table is refused before anything is opened."""
    before = autocast_state("hpu")
    with pytest.raises(UserError, match="device 'hpu' has no table"):
        autocast("hpu", **KINDS[kind])
    assert autocast_state("hpu") == before


@pytest.mark.parametrize("kind", ["default", "torch", "lean", "cache"])
def test_nothing_recorded_nothing_reported(kind: str) -> None:
    """Law: a region that did not record says so, instead of an empty report."""
    region = autocast("cpu", **KINDS[kind])
    with region, pytest.raises(UserError, match="record=True"):
        region.report()


@pytest.mark.parametrize(
    ("policy", "model", "words"),
    [
        ("torch + op:mm=fp32 + type:LayerNorm=fp32", None, "'type:LayerNorm=fp32' na"),
        ("torch + module:*=low + module:head=fp32", nn.Linear(2, 2), "head=fp32' mat"),
        ("lean + op:sofmax=fp32", None, "did you mean 'op:softmax=fp32'"),
        ("leen", None, "policy='leen' is not known"),
    ],
)
def test_policies_that_cannot_be_followed(
    policy: str, model: nn.Module | None, words: str
) -> None:
    """Law: a rule that would be ignored is refused when the context is made."""
    with pytest.raises(UserError, match=words):
        autocast("cpu", policy=policy, model=model)
    assert model is None or not model._forward_pre_hooks

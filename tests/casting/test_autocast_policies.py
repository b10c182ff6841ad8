"""Regions under policies: inside one another, around model code, and what they say."""

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from twins import patched

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.dtype_mismatch import DtypeMismatch
from halfstep.casting.weight_cache import CastCache
from halfstep.policy import LEAN, TORCH, Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
A, V = torch.eye(4), torch.ones(4)


def mm() -> torch.dtype:
    return A.mm(A).dtype


def mv() -> torch.dtype:
    """Return in which dtype a product with a vector runs."""
    return A.mv(V).dtype


def ran() -> tuple[torch.dtype, torch.dtype]:
    """Return both: every table has a row for the first, only lean for the second."""
    return mm(), mv()


STOCK, ALL_LOW, NONE_LOW = (BF16, FP32), (BF16, BF16), (FP32, FP32)
MM = "torch + op:mm=fp32"
MV = "torch + op:mv=low"


def test_tables(tmp_path: Path) -> None:
    """Law: what is compared below: nothing, torch's table, the lean one, rules.

    A policy is a word, a `Policy`, a sum of one and a rule, or the path of a file.
    """
    assert ran() == NONE_LOW
    file = tmp_path / "rules.toml"
    Policy.parse(MV).save(file)
    both = "lean + op:mm=fp32"
    for policy, expected in (
        (None, STOCK),
        ("torch", STOCK),
        ("lean", ALL_LOW),
        (MM, NONE_LOW),
        (MV, ALL_LOW),
        (both, (FP32, BF16)),
        (Policy.parse(both), (FP32, BF16)),
        (LEAN + "op:mm=fp32", (FP32, BF16)),
        (file, ALL_LOW),
        (str(file), ALL_LOW),
    ):
        with autocast("cpu", policy=policy):
            assert ran() == expected
            # Inside matmul, mm is not asked about: the outer operation decides.
            assert A.matmul(A).dtype == BF16
        assert ran() == NONE_LOW


@pytest.mark.parametrize("outer", ["lean", MM, MV])
def test_no_policy_is_that_of_the_region_around(outer: str) -> None:
    """Law: policy=None inherits, with its own dtype; "torch" resets; both end."""
    with autocast("cpu", policy=outer):
        before = ran()
        for more in ({}, {"cache": CastCache()}, {"record": True}):
            with autocast("cpu", FP16, **more):
                assert ran() == tuple(FP16 if t == BF16 else t for t in before)
            assert ran() == before
            with autocast("cpu", policy="torch", **more):
                assert ran() == STOCK
        for policy in ("torch", TORCH, Policy()):
            with autocast("cpu", policy=policy):
                with autocast("cpu"):
                    assert ran() == STOCK
                with autocast("cpu", policy="lean"):
                    assert ran() == ALL_LOW
                # Rules of two regions do not add up.
                with autocast("cpu", policy=MM):
                    assert ran() == NONE_LOW
                assert ran() == STOCK
            assert ran() == before


# Model code with regions of torch's


def model_code() -> dict[str, tuple[torch.dtype, torch.dtype]]:
    seen = {"around": ran()}
    with torch.autocast("cpu", enabled=False):
        seen["island"] = ran()
        with torch.autocast("cpu", torch.float16):
            seen["inside the island"] = ran()
    with torch.autocast("cpu", torch.float16):
        seen["other dtype"] = ran()
    with torch.amp.autocast("cpu", torch.bfloat16, cache_enabled=False):
        seen["no cache"] = ran()
    seen["decorated"] = torch.autocast("cpu", enabled=False)(ran)()
    seen["after"] = ran()
    return seen


@pytest.mark.parametrize(
    ("policy", "mm_low", "mv_low"),
    [
        (None, True, False),
        ("torch", True, False),
        ("lean", True, True),
        (MM, False, False),
    ],
)
def test_regions_of_torchs_inside(
    policy: str | None, mm_low: bool, mv_low: bool
) -> None:
    """Law: torch's regions say whether and in which dtype; the policy, for what."""

    def expected(low: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        return low if mm_low else FP32, low if mv_low else FP32

    with autocast("cpu", BF16, policy=policy):
        seen = model_code()
    assert seen == {
        "around": expected(BF16),
        "island": NONE_LOW,
        "inside the island": expected(FP16),
        "other dtype": expected(FP16),
        "no cache": expected(BF16),
        "decorated": NONE_LOW,
        "after": expected(BF16),
    }
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("policy", ["torch", "lean", MM])
def test_an_island_of_ours_is_one(policy: str) -> None:
    """Law: enabled=False is off, whatever policy it is given, in and out of regions."""
    with autocast("cpu", enabled=False, policy=policy):
        assert ran() == NONE_LOW
    with autocast("cpu", policy="lean"):
        with autocast("cpu", enabled=False, policy=policy):
            assert ran() == NONE_LOW
        assert ran() == ALL_LOW


def test_a_region_of_torchs_around_ours() -> None:
    """Law: ours inside torch's is as it is alone, and torch's goes on after it."""
    with torch.autocast("cpu", FP16):
        with autocast("cpu", policy="lean"):
            # Without a dtype it is that of the region around, as in torch.
            assert ran() == (FP16, FP16)
        with autocast("cpu", BF16, policy="lean"):
            assert ran() == ALL_LOW
        assert ran() == (FP16, FP32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return self.body(x).dtype, self.head(x).dtype


# What rules say of themselves

_fresh = itertools.count()


def fresh(word: str) -> str:
    """Return a policy that no other test has: each rule is told of once a process."""
    return f"{word} + op:/lgamma|fresh{next(_fresh)}/=fp32"


def test_an_unmatched_rule_is_told_of_once() -> None:
    """Law: a rule that no operation met is warned of when its region ends, once.

    A region that an exception left early warns of nothing.
    """
    word = fresh("torch")
    region = autocast("cpu", policy=word)
    with pytest.raises(KeyError), region:
        raise KeyError
    with pytest.warns(UserWarning, match="matched nothing") as caught, region:
        A.mm(A)
    assert len(caught) == 1
    assert repr(word.removeprefix("torch + ")) in str(caught[0].message)
    assert caught[0].filename == __file__
    for again in (region, autocast("cpu", policy=word)):
        with again:  # A warning is an error here.
            A.mm(A)


def test_a_matched_rule_is_not() -> None:
    """Law: a rule that decided something is never warned of, in any region."""
    word = fresh("torch + op:mm=fp32")
    with autocast("cpu", policy=word):
        A.mm(A)
        A.lgamma()
    with autocast("cpu", policy=word):
        A.exp()


@pytest.mark.parametrize("decorated", [False, True])
def test_a_warning_that_is_an_error(decorated: bool) -> None:
    """Law: the warning comes when all is restored."""
    region = autocast("cpu", policy=fresh("torch"))

    def run() -> None:
        with region:
            ran()

    with pytest.raises(UserWarning, match="matched nothing"):
        (region(ran) if decorated else run)()
    assert not torch.is_autocast_enabled("cpu")
    assert active_context.active("cpu") is None


def test_rules_on_modules_match_by_being_entered() -> None:
    """Law: a module rule is met when its module runs, though nothing is cast in it."""
    net = Net()
    word = fresh("torch + module:body=keep + module:head=fp32")
    with autocast("cpu", policy=word, model=net):
        net(A)
        A.lgamma()
    other = word.replace("fresh", "other")
    told = pytest.warns(UserWarning, match="'module:head=fp32' matched nothing")
    with told, autocast("cpu", policy=other, model=net):
        net.body(A)
        A.lgamma()


def attend(x: Tensor, y: Tensor) -> Tensor:
    return torch.dot(x, y)


@pytest.mark.parametrize("policy", [None, "torch", MM])
def test_a_mismatch_is_explained(policy: str | None) -> None:
    """Law: torch's error leaves a region with operation, dtypes and the rule.

    Regions around it pass on the first explanation.
    """
    region = autocast("cpu", policy=policy)
    with pytest.raises(DtypeMismatch) as caught, autocast("cpu"), autocast("cpu", FP16):
        region(attend)(V.bfloat16(), V)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.operation, error.rule) == ("dot", "op:dot=promote")
    assert error.dtypes == (BF16, FP32)
    assert type(error.__cause__) is RuntimeError
    assert not torch.is_autocast_enabled("cpu")
    with autocast("cpu", policy=f"torch + {error.rule}"):
        assert attend(V.bfloat16(), V) == 4


# Any nest of contexts, left in any way: torch's state is as it was before


TYPES = ("cpu", "cuda", "xpu", "mps", "ipu", "maia", "mtia", "hpu")
DEVICES = tuple(filter(torch.amp.is_autocast_available, TYPES))
States = tuple[object, ...]


def state_now() -> States:
    """Return all that torch keeps about autocast in this thread, and our frame."""
    torch.autocast_increment_nesting()
    return (
        [torch.is_autocast_enabled(device) for device in DEVICES],
        [torch.get_autocast_dtype(device) for device in DEVICES],
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
        id(active_context.active("cpu")),
        torch._C._len_torch_dispatch_stack(),
    )


class Stop(Exception):  # noqa: N818 -- no error, a way out
    """What a nest raises."""


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor, inside: Callable[[], None]) -> Tensor:
        product: Tensor = x @ self.weight
        inside()
        return product


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = Inner(), Inner()

    def forward(self, x: Tensor, inside: Callable[[], None]) -> Tensor:
        hidden: Tensor = self.inner(x, lambda: None)
        return self.other(hidden, inside)


MODEL, CACHE = Model(), CastCache()
RULES = "torch + op:add.Tensor=fp32 + module:inner=fp32 + type:Inner=low"
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": torch.float16, "cache_enabled": False},
    {"enabled": False},
    {"policy": "torch"},
    {"policy": "lean"},
    {"policy": "lean", "dtype": torch.float16, "cache": CACHE},
    {"policy": RULES, "model": MODEL},
    {"policy": RULES, "model": MODEL, "enabled": False},
    {"record": True},
    {"record": True, "policy": RULES, "model": MODEL, "dtype": torch.float16},
    {"cache": CACHE, "cache_enabled": False},
)


@dataclass(frozen=True)
class Nest:
    """One use of a region, what happens inside, and how it ends."""

    setting: int
    shared: bool = False
    """One instance serves the whole example, or a new one is made."""
    way: str = "with"
    place: str = "here"
    raises: bool = False
    caught: bool = False
    children: "tuple[Nest, ...]" = ()


def nests(children: st.SearchStrategy[tuple[Nest, ...]]) -> st.SearchStrategy[Nest]:
    return st.builds(
        Nest,
        st.integers(0, len(SETTINGS) - 1),
        st.booleans(),
        st.sampled_from(["with", "decorator", "torch"]),
        st.sampled_from(["here", "module", "thread"]),
        st.booleans(),
        st.booleans(),
        children,
    )


NESTS = st.recursive(
    nests(st.just(())),
    lambda inner: nests(st.lists(inner, max_size=3).map(tuple)),
    max_leaves=8,
)
FRESH = state_now()


def run_in(place: str, task: Callable[[], None]) -> None:
    """Do a task here, inside a module's forward, or in a thread of its own."""
    if place == "here":
        task()
    elif place == "module":
        MODEL(torch.ones(2, 2), task)
    else:
        raised: list[BaseException] = []

        def guarded() -> None:
            assert state_now() == FRESH
            try:
                task()
            except BaseException as error:  # noqa: BLE001 -- raised again below
                raised.append(error)
            finally:
                assert state_now() == FRESH

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]


def use(nest: Nest, shared: list[Any]) -> None:
    """Play a nest; check the state_now on entry, between children, and after."""
    settings = SETTINGS[nest.setting]
    on = settings.get("enabled", True)

    def inside() -> None:
        entered = state_now()
        assert torch.is_autocast_enabled("cpu") == on
        if nest.way != "torch" and "dtype" in settings:
            assert torch.get_autocast_dtype("cpu") == settings["dtype"]
        for child in nest.children:
            run_in(child.place, lambda child=child: use(child, shared))  # type: ignore[misc]
            assert state_now() == entered
        if nest.raises:
            raise Stop

    before = state_now()
    if nest.way == "torch":
        region: Any = torch.autocast("cpu", enabled=on)
    elif nest.shared:
        region = shared[nest.setting]
    else:
        region = autocast("cpu", **settings)
    try:
        if nest.way == "decorator":
            region(inside)()
        else:
            with region:
                inside()
        assert not nest.raises  # no exception is hidden
    except Stop:
        if not nest.caught:
            raise
    finally:
        assert state_now() == before


@pytest.fixture
def _any_rule() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "policy rule", UserWarning)
        yield


@given(nest=NESTS)
@settings(max_examples=150)
@pytest.mark.usefixtures("_any_rule")
def test_any_nest_is_left_as_it_was_entered(nest: Nest) -> None:
    """Law: whatever is nested, shared, raised and caught, each exit restores all."""
    assert state_now() == FRESH
    shared = [autocast("cpu", **settings) for settings in SETTINGS]
    with suppress(Stop):
        use(nest, shared)
    assert state_now() == FRESH
    assert active_context.active("cpu") is None
    assert not active_context.in_context()
    assert not patched()

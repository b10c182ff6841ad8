"""Any nest of regions, left in any way: torch's state is as it was before."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from twins import patched

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache

TYPES = ("cpu", "cuda", "xpu", "mps", "ipu", "maia", "mtia", "hpu")
DEVICES = tuple(filter(torch.amp.is_autocast_available, TYPES))
State = tuple[object, ...]


def state() -> State:
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
FRESH = state()


def run_in(place: str, task: Callable[[], None]) -> None:
    """Do a task here, inside a module's forward, or in a thread of its own."""
    if place == "here":
        task()
    elif place == "module":
        MODEL(torch.ones(2, 2), task)
    else:
        raised: list[BaseException] = []

        def guarded() -> None:
            assert state() == FRESH
            try:
                task()
            except BaseException as error:  # noqa: BLE001 -- raised again below
                raised.append(error)
            finally:
                assert state() == FRESH

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]


def use(nest: Nest, shared: list[Any]) -> None:
    """Play a nest; check the state on entry, between children, and after."""
    settings = SETTINGS[nest.setting]
    on = settings.get("enabled", True)

    def inside() -> None:
        entered = state()
        assert torch.is_autocast_enabled("cpu") == on
        if nest.way != "torch" and "dtype" in settings:
            assert torch.get_autocast_dtype("cpu") == settings["dtype"]
        for child in nest.children:
            run_in(child.place, lambda child=child: use(child, shared))  # type: ignore[misc]
            assert state() == entered
        if nest.raises:
            raise Stop

    before = state()
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
        assert state() == before


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
    assert state() == FRESH
    shared = [autocast("cpu", **settings) for settings in SETTINGS]
    with suppress(Stop):
        use(nest, shared)
    assert state() == FRESH
    assert active_context.active("cpu") is None
    assert not active_context.in_context()
    assert not patched()

"""Eager regions: torch's own state, and restored whatever happens inside."""

from __future__ import annotations

import copy
import pickle
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.casting import autocast
from halfstep.errors import UserError
from halfstep.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)

torch_only = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason=f"the defect was seen in torch 2.13, this is {torch.__version__}",
)
"""Marks twins, in which torch.autocast is the oracle for the defect avoided here."""


def state(device: str = "cpu") -> tuple[object, ...]:
    """Return all that torch keeps about autocast in this thread, depth included."""
    torch.autocast_increment_nesting()
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
    )


OFF = (False, torch.bfloat16, True, 0)


@pytest.fixture
def _mended() -> Iterator[None]:
    """Turn off what a defect of torch leaves on."""
    yield
    torch.set_autocast_enabled("cpu", False)  # noqa: FBT003 -- torch's own
    assert state() == OFF


# What torch sees


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_sees_the_region(dtype: torch.dtype) -> None:
    """Law: inside, torch's own state says on, dtype and cache; after, as before."""
    assert state() == OFF
    with autocast("cpu", dtype, cache_enabled=False):
        assert state() == (True, dtype, False, 1)
        with autocast("cpu", enabled=False):
            # The dtype is that of the moment when the instance is made.
            assert state() == (False, dtype, False, 2)
        assert state() == (True, dtype, False, 1)
    assert state() == OFF


def test_it_is_a_torch_autocast() -> None:
    """Law: whoever asks for an instance of torch's class gets one, entered or not."""
    region = autocast("cpu")
    assert isinstance(region, torch.autocast)
    with region as entered:
        assert entered is region
    assert region.policy is None


def test_arguments_are_torchs() -> None:
    """Law: wrong arguments get torch's own answer, when the instance is made."""
    for make in (torch.autocast, autocast):
        with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
            make(torch.device("cpu"))  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="target dtype is not supported"):
            region = make("cpu", torch.float32)
        # Entering warns no second time: a warning is an error here.
        with region:
            assert not torch.is_autocast_enabled("cpu")


# Twice entered


def enter_twice(make: Callable[[str], Any]) -> tuple[object, ...]:
    """Enter one instance inside itself; return the state afterwards."""
    region = make("cpu")
    with region, region:
        assert torch.is_autocast_enabled("cpu")
    return state()


def recurse(make: Callable[[str], Any]) -> tuple[object, ...]:
    """Let a decorated function call itself; return the state afterwards."""

    def countdown(number: int) -> int:
        assert torch.is_autocast_enabled("cpu")
        return again(number - 1) + 1 if number else 0

    again: Callable[[int], int] = make("cpu")(countdown)
    assert again(5) == 5
    return state()


def overlap(make: Callable[[str], Any]) -> tuple[object, ...]:
    """Share one instance with a thread that enters first and leaves first.

    Returns the state of that thread, which was in no other region, afterwards.
    """
    shared, inside, leave = make("cpu"), threading.Event(), threading.Event()
    seen: list[tuple[object, ...]] = []

    def other() -> None:
        with shared:
            inside.set()
            leave.wait(timeout=60)
        seen.append(state())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(timeout=60)
    with torch.autocast("cpu"):
        before = state()
        with shared:
            leave.set()
            thread.join()
        assert state() == before
    return seen[0]


WAYS = pytest.mark.parametrize("way", [enter_twice, recurse, overlap])


@WAYS
def test_entered_while_entered(
    way: Callable[[Callable[[str], Any]], tuple[object, ...]],
) -> None:
    """Law: one instance may be entered again, by itself and by other threads."""
    assert way(autocast) == OFF


@WAYS
@torch_only
@pytest.mark.usefixtures("_mended")
def test_twin_torch_stays_on(
    way: Callable[[Callable[[str], Any]], tuple[object, ...]],
) -> None:
    """Law: torch's own class loses the outer state in each of these ways.

    Where this fails, torch was mended and `halfstep.casting` may go.
    """
    assert way(torch.autocast) == (True, *OFF[1:])


# Any nest, any exception


class Stop(Exception):  # noqa: N818 -- no error, a way out
    """What a nest raises."""


@dataclass(frozen=True)
class Nest:
    """One use of a shared instance, what happens inside, and how it ends."""

    index: int
    decorated: bool
    children: list[Nest]
    raises: bool
    caught: bool


SETTINGS = [
    (torch.bfloat16, True, True),
    (torch.float16, True, False),
    (torch.bfloat16, False, True),
]
NESTS = st.recursive(
    st.builds(
        Nest,
        st.integers(0, 2),
        st.booleans(),
        st.just([]),
        st.booleans(),
        st.booleans(),
    ),
    lambda inner: st.builds(
        Nest,
        st.integers(0, 2),
        st.booleans(),
        st.lists(inner, max_size=3),
        st.booleans(),
        st.booleans(),
    ),
    max_leaves=12,
)


def use(nest: Nest, regions: list[autocast], depth: int) -> None:
    """Play a nest; check the state on entry, between children, and after."""
    before = state()
    dtype, enabled, cache = SETTINGS[nest.index]
    expected = (enabled, dtype, cache, depth + 1)

    def inside() -> None:
        assert state() == expected
        for child in nest.children:
            use(child, regions, depth + 1)
            assert state() == expected
        if nest.raises:
            raise Stop

    try:
        if nest.decorated:
            regions[nest.index](inside)()
        else:
            with regions[nest.index]:
                inside()
    except Stop:
        if not nest.caught:
            raise
    finally:
        assert state() == before


@given(nest=NESTS)
def test_any_nest_is_left_as_it_was_entered(nest: Nest) -> None:
    """Law: in any nest of shared instances each exit, by exception too, restores."""
    regions = [
        autocast("cpu", dtype, enabled, cache_enabled=cache)
        for dtype, enabled, cache in SETTINGS
    ]
    with suppress(Stop):
        use(nest, regions, 0)
    assert state() == OFF
    assert all(not region._regions.entered for region in regions)


def test_exceptions_pass() -> None:
    """Law: a region hides no exception."""
    with pytest.raises(Stop), autocast("cpu"):
        raise Stop
    assert state() == OFF


def test_copies_are_not_entered() -> None:
    """Law: an instance can be copied and pickled, as torch's can, entered too."""
    region = autocast("cpu", torch.float16, cache_enabled=False)
    with region:
        twins = [copy.deepcopy(region), pickle.loads(pickle.dumps(region))]  # noqa: S301
    for twin in twins:
        with twin, twin:
            assert state() == (True, torch.float16, False, 2)
        assert state() == OFF


# Policy


@pytest.mark.parametrize("policy", [None, "torch", Policy()])
def test_torchs_own_policy_is_accepted(policy: Policy | str | None) -> None:
    """Law: torch's table, by any of its names, is what a region follows."""
    with autocast("cpu", policy=policy):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("parsed", [False, True])
def test_rules_are_refused(parsed: bool) -> None:
    """Law: rules that a bare region cannot follow are not ignored in silence."""
    word = "torch + type:LayerNorm=fp32"
    with pytest.raises(UserError) as caught:
        autocast("cpu", policy=Policy.parse(word) if parsed else word)
    assert str(caught.value) == (
        "policy='torch + type:LayerNorm=fp32' holds rules, and a bare region does not "
        "know the model they speak of: pass the policy to halfstep.prepare()."
    )


def test_unknown_policy_is_refused() -> None:
    """Law: a word that names no policy gets the policy's own answer."""
    with pytest.raises(UserError, match=r"^policy='lean' is not known; "):
        autocast("cpu", policy="lean")


# Numbers


def mlp(device: str) -> nn.Module:
    """Return a small network with matrix products, a norm and a softmax."""
    torch.manual_seed(1)
    layers = (nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    return nn.Sequential(*layers, nn.LogSoftmax(1)).to(device)


def train(make: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Take three steps; return losses, gradients and weights."""
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        x, y = torch.randn(4, 16).to(device), torch.arange(4, device=device)
        with make(device, dtype):
            loss = nn.functional.nll_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        seen += [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*seen, *model.parameters()]


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_torchs(dtype: torch.dtype, device: str) -> None:
    """Law: losses, gradients and weights are those of torch.autocast, to the bit."""
    ours, theirs = (train(make, dtype, device) for make in (autocast, torch.autocast))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    # Twin: the comparison can fail, for the other format gives other numbers.
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    assert not torch.equal(train(autocast, other, device)[0], ours[0])


class Block(nn.Module):
    """A network that takes down the dtypes of what its first layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        """Compute, the second layer in fp32."""
        hidden: Tensor = self.first(x)
        self.seen.append(hidden.dtype)
        # A region of its own, on an instance that the recomputation enters again.
        out: Tensor = ISLAND(self.second)(hidden.float().tanh())
        return out


ISLAND = autocast("cpu", enabled=False)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_activation_checkpointing(reentrant: bool | None) -> None:
    """Law: recomputation in backward runs in the formats of the forward pass."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    region = autocast("cpu", torch.float16)
    with region:
        out = (
            block(x)
            if reentrant is None
            else checkpoint(block, x, use_reentrant=reentrant)
        )
    out.sum().backward()
    runs = 1 if reentrant is None else 2
    assert block.seen == [torch.float16] * runs
    assert out.dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        plain = block.first(x)
    expected = torch.autograd.grad(
        block.second(plain.float().tanh()).sum(), [x, *block.parameters()]
    )
    actual = [x.grad, *(param.grad for param in block.parameters())]
    torch.testing.assert_close(actual, list(expected), rtol=0, atol=0)
    assert state() == OFF

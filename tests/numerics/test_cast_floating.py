"""Nested values are cast as they are: aliases, odd constructors, what holds itself."""

from __future__ import annotations

import dataclasses
import threading
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from halfstep.numerics.formats import cast_floating

BF16, FP32 = torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Its constructor takes what it does not keep, and leaves a field empty."""

    values: Tensor
    factor: dataclasses.InitVar[float]
    scaled: Tensor = dataclasses.field(init=False)
    later: Tensor = dataclasses.field(init=False)

    def __post_init__(self, factor: float) -> None:
        object.__setattr__(self, "scaled", self.values * factor)


@dataclasses.dataclass(slots=True)
class Slots:
    values: Tensor
    note: str = ""


@dataclasses.dataclass
class Node:
    values: Tensor
    above: Any = None
    below: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Part(nn.Module):
    values: Tensor

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = nn.Module.__hash__


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Strict(Pair):
    """A named tuple whose constructor takes one thing, and notes it."""

    note: str

    def __new__(cls, both: Tensor) -> Self:
        made = super().__new__(cls, both, both)
        made.note = "made"
        return made


class Sized(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, *items: object) -> Self:
        return super().__new__(cls, items)


class Named(list[Any]):
    def __init__(self, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self.name = name


def ones(dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones(2, dtype=dtype)


def test_aliases_stay_aliases() -> None:
    """Law: what occurs twice is cast once; both places hold one object afterwards."""
    last, inner = ones(), [ones()]
    given_ = {"last": last, "all": (ones(), last), "a": inner, "b": inner}
    cast: Any = cast_floating(given_, BF16)
    assert cast["last"] is cast["all"][1]
    assert cast["last"] is not cast["all"][0]
    assert cast["a"] is cast["b"]
    assert cast["a"][0].dtype == cast["last"].dtype == BF16


def test_a_shared_tensor_is_one_node_of_the_graph() -> None:
    """Law: gradients of a tensor that is returned twice add up in the wide format."""
    leaf = torch.ones(1, dtype=BF16, requires_grad=True)
    one, two = cast_floating((leaf, leaf), FP32)
    # Halfway between bf16 numbers, both would be rounded down one by one, to
    # 1 + 0 and 1 + 2**-6; their sum is 2 + 1.5 ulps and rounds up, to the even.
    torch.autograd.backward((one * (1 + 2.0**-8) + two * (1 + 5 * 2.0**-8)).sum())
    assert leaf.grad is not None
    assert leaf.grad.item() == 2 + 2.0**-5


HARMLESS = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.just(torch.arange(2)),
        st.just(ones(torch.float64)),
        st.just(ones(BF16)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(lambda item: UserDict({"a": item})),
        inner.map(lambda item: BaseModelOutput(last_hidden_state=item)),
        inner.map(lambda item: Node(torch.arange(2), above=item)),
    ),
    max_leaves=8,
)


@given(value=HARMLESS)
def test_what_needs_no_cast_is_itself(value: object) -> None:
    """Law: a container without a tensor to cast comes back, and no copy of it."""
    assert cast_floating(value, BF16) is value


def test_no_constructor_runs() -> None:
    """Law: fields that no constructor fills are cast; empty ones stay empty."""
    frozen = Frozen(ones(), 3.0)
    cast = cast_floating(frozen, BF16)
    assert type(cast) is Frozen
    assert (cast.values.dtype, cast.scaled.dtype) == (BF16, BF16)
    assert cast.scaled.tolist() == [3, 3]
    assert not hasattr(cast, "later")
    assert frozen.values.dtype == frozen.scaled.dtype == FP32
    slots = cast_floating(Slots(ones(), "n"), BF16)
    assert (slots.values.dtype, slots.note) == (BF16, "n")


def test_odd_sequences() -> None:
    """Law: tuples and lists keep their type whatever their constructors take."""
    strict = cast_floating(Strict(ones()), BF16)
    assert (type(strict), strict.note) == (Strict, "made")
    assert strict.left is strict.right
    assert strict.left.dtype == BF16
    sized = cast_floating(Sized(ones(), 3), BF16)
    assert (type(sized), sized[0].dtype, sized[1]) == (Sized, BF16, 3)
    named = cast_floating(Named("n", [ones(), 3]), BF16)
    assert (type(named), named.name, named[0].dtype) == (Named, "n", BF16)
    assert named[1] == 3


def test_what_holds_itself() -> None:
    """Law: a tree whose nodes know their parents is copied as the tree it is."""
    root = Node(ones())
    root.below = [Node(ones(), root), Node(ones(), root)]
    cast = cast_floating(root, BF16)
    assert cast is not root
    for old, new in zip(root.below, cast.below, strict=True):
        assert old.above is root
        assert new.above is cast
        assert (old.values.dtype, new.values.dtype) == (FP32, BF16)
    ring: dict[str, Any] = {"x": ones()}
    ring["self"] = [ring]
    turned = cast_floating(ring, BF16)
    assert turned["self"][0] is turned
    assert turned["x"].dtype == BF16


class Locked(MutableMapping[str, Any]):
    def __init__(self, **items: object) -> None:
        self.items_ = items
        self.lock = threading.Lock()

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: object) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Unknown:
    def __init__(self) -> None:
        self.values = ones()


@pytest.mark.parametrize(
    "value",
    [
        Unknown(),
        {ones()},
        frozenset([1]),
        iter([ones()]),
        (ones() for _ in range(1)),
        Part(ones()),
        nn.Linear(2, 2),
        Frozen,
        "words",
        Locked(a=3, b=torch.arange(2)),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_pass(value: object) -> None:
    """Law: sets, generators, modules, classes and unknown objects are left alone."""
    assert cast_floating((ones(), value), BF16)[1] is value


def test_sparse_and_views() -> None:
    """Law: sparse tensors and views are tensors like others."""
    sparse = torch.eye(3).to_sparse()
    base = torch.ones(2, 3)
    cast = cast_floating([sparse, base.t(), base.expand(4, 2, 3)], BF16)
    assert [tensor.dtype for tensor in cast] == [BF16] * 3
    assert cast[0].is_sparse
    assert torch.equal(cast[0].to_dense(), torch.eye(3, dtype=BF16))
    assert [tensor.shape for tensor in cast[1:]] == [(3, 2), (4, 2, 3)]

"""Nested values are cast as they are: shared tensors, odd constructors."""

import dataclasses
import threading
from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from halfstep.numerics.formats import cast_floating, tensors_in

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNTOUCHED = (torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
TRAINED_IN = (FP32, BF16, FP16)


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
    above: Any


@dataclasses.dataclass
class Part(nn.Module):
    """A module that is a dataclass as well."""

    values: Tensor

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = nn.Module.__hash__


class Pair(NamedTuple):
    left: Tensor
    right: object


class Strict(Pair):
    """A named tuple whose constructor takes one thing, and notes it."""

    note: str

    def __new__(cls, both: Tensor) -> Self:
        made = super().__new__(cls, both, both)
        made.note = "made"
        return made


class Sized(tuple[Any, ...]):
    """A tuple whose constructor wants more."""

    __slots__ = ()

    def __new__(cls, *items: object) -> Self:
        return super().__new__(cls, items)


class Named(list[Any]):
    """A list whose constructor wants more."""

    def __init__(self, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self.name = name


def ones(dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones(2, dtype=dtype)


VALUES = st.recursive(
    st.one_of(
        st.sampled_from([*TRAINED_IN, *UNTOUCHED]).map(ones),
        st.sampled_from([None, 3, "text"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(lambda item: OrderedDict(a=item)),
        inner.map(lambda item: UserDict({"a": item})),
        inner.map(lambda item: Pair(ones(FP16), item)),
        inner.map(lambda item: BaseModelOutput(last_hidden_state=item)),
        inner.map(lambda item: Node(torch.arange(2), above=item)),
    ),
    max_leaves=12,
)


def assert_cast(before: Any, after: Any, dtype: torch.dtype) -> None:
    """Compare, value by value, with the rule as the docstring states it."""
    assert type(after) is type(before)
    if isinstance(before, Tensor):
        assert after.dtype == (dtype if before.dtype in TRAINED_IN else before.dtype)
        assert torch.equal(after.to(before.dtype), before)
    elif isinstance(before, dict | UserDict):
        assert list(after) == list(before)
        assert_cast(list(before.values()), list(after.values()), dtype)
    elif isinstance(before, list | tuple):
        assert len(after) == len(before)
        for old, new in zip(before, after, strict=True):
            assert_cast(old, new, dtype)
    elif isinstance(before, Node):
        assert_cast(list(vars(before).values()), list(vars(after).values()), dtype)
    else:
        assert after is before


@given(value=VALUES, dtype=st.sampled_from(TRAINED_IN))
def test_cast_keeps_structure(value: object, dtype: torch.dtype) -> None:
    """Law: containers keep type and order, and just fp32, bf16 and fp16 are cast.

    A container without a tensor to cast comes back itself, and no copy of it.
    """
    cast = cast_floating(value, dtype)
    assert_cast(value, cast, dtype)
    castable = {t.dtype for t in tensors_in(value)}.intersection(TRAINED_IN)
    assert (cast is value) == (castable <= {dtype})


def test_a_shared_tensor_stays_one() -> None:
    """Law: a tensor that occurs twice is cast once; both places hold one object."""
    last = ones()
    cast: Any = cast_floating({"last": last, "all": (ones(), last)}, BF16)
    assert cast["last"] is cast["all"][1]
    assert cast["last"] is not cast["all"][0]
    assert cast["last"].dtype == BF16


def test_unchanged_containers_are_no_copies() -> None:
    """Law: a container that holds nothing to cast stays itself inside of one that does.

    A model may fill it: a cache that begins empty.
    """
    cache: list[Tensor] = []
    (x,), options = cast_floating(((ones(),), {"cache": cache}), BF16)
    assert x.dtype == BF16
    assert options["cache"] is cache


def test_a_shared_tensor_is_one_node_of_the_graph() -> None:
    """Law: gradients of a tensor that is returned twice add up in the wide format."""
    leaf = torch.ones(1, dtype=BF16, requires_grad=True)
    one, two = cast_floating((leaf, leaf), FP32)
    # Halfway between bf16 numbers, both would be rounded down one by one, to
    # 1 + 0 and 1 + 2**-6; their sum is 2 + 1.5 ulps and rounds up, to the even.
    torch.autograd.backward((one * (1 + 2.0**-8) + two * (1 + 5 * 2.0**-8)).sum())
    assert leaf.grad is not None
    assert leaf.grad.item() == 2 + 2.0**-5


def test_no_constructor_runs() -> None:
    """Law: fields that no constructor fills are cast; empty ones stay empty.

    Tuples and lists keep their type whatever their constructors take.
    """
    frozen = Frozen(ones(), 3.0)
    cast = cast_floating(frozen, BF16)
    assert type(cast) is Frozen
    assert (cast.values.dtype, cast.scaled.dtype) == (BF16, BF16)
    assert cast.scaled.tolist() == [3, 3]
    assert not hasattr(cast, "later")
    assert frozen.values.dtype == frozen.scaled.dtype == FP32
    slots = cast_floating(Slots(ones(), "n"), BF16)
    assert (slots.values.dtype, slots.note) == (BF16, "n")
    strict = cast_floating(Strict(ones()), BF16)
    assert (type(strict), strict.note) == (Strict, "made")
    assert strict.left is strict.right
    assert strict.left.dtype == BF16
    sized = cast_floating(Sized(ones(), 3), BF16)
    assert (type(sized), sized[0].dtype, sized[1]) == (Sized, BF16, 3)
    named = cast_floating(Named("n", [ones(), 3]), BF16)
    assert (type(named), named.name, named[0].dtype) == (Named, "n", BF16)
    assert named[1] == 3


def test_model_output_stays_one() -> None:
    """Law: a transformers ModelOutput keeps keys, attributes and None fields."""
    output: Any = MaskedLMOutput(logits=ones(), hidden_states=(ones(),))
    cast = cast_floating(output, BF16)
    assert list(cast) == ["logits", "hidden_states"]
    assert cast.loss is None
    assert cast.logits is cast["logits"]
    assert cast.logits.dtype == cast["hidden_states"][0].dtype == BF16
    assert output.logits.dtype == FP32


def test_torch_containers() -> None:
    """Law: torch's own tuples survive: packed sequences, return types, sizes.

    Sparse tensors and views are tensors like others.
    """
    packed = cast_floating(pack_sequence([torch.ones(2), torch.ones(1)]), FP16)
    assert isinstance(packed, PackedSequence)
    assert (packed.data.dtype, packed.batch_sizes.dtype) == (FP16, torch.int64)
    found = cast_floating(torch.ones(2, 2).max(0), FP16)
    assert isinstance(found, torch.return_types.max)
    assert (found.values.dtype, found.indices.dtype) == (FP16, torch.int64)
    assert cast_floating(torch.Size([2, 3]), FP16) == torch.Size([2, 3])
    sparse, view = cast_floating([torch.eye(3).to_sparse(), torch.ones(2, 3).t()], BF16)
    assert torch.equal(sparse.to_dense(), torch.eye(3, dtype=BF16))
    assert (view.shape, view.dtype) == ((3, 2), BF16)


class Locked(MutableMapping[str, Any]):
    """A mapping that cannot be copied."""

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
        (ones() for _ in range(1)),
        Part(ones()),
        nn.Linear(2, 2),
        Frozen,
        Locked(a=3, b=torch.arange(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_pass(value: object) -> None:
    """Law: sets, generators, modules, classes and unknown objects are left alone."""
    assert cast_floating((ones(), value), BF16)[1] is value

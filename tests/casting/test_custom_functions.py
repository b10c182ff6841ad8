"""Functions under autocast: `low_precision`, `full_precision` and `promote`.

The oracle is the same function, called on operands cast by hand with autocast off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure
from twins import Contexts, autocast_state, entered, same_bits

from halfstep.casting.custom_functions import full_precision, low_precision, promote

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Decorator = Callable[[Any], Any]
ROWS: list[tuple[Decorator, Contexts, tuple[torch.dtype, ...], torch.dtype]] = [
    (low_precision, (BF16,), (FP32, FP16), BF16),
    (low_precision, (None, FP16), (FP32, FP32), FP16),
    (full_precision, (BF16,), (FP32, FP16), FP32),
    (full_precision, (None, FP16), (FP16, FP16), FP32),
    (promote, (BF16,), (BF16, FP16), FP32),
    (promote, (FP16,), (FP16, FP16), FP16),
    (promote, (FP16,), (FP16, FP32), FP32),
    # The one of the two that is not autocast's counts as wider.
    (promote, (BF16,), (FP16, FP16), FP32),
]
"""Decorator, regions and dtypes of the operands -> dtype of the product."""

DECORATORS = pytest.mark.parametrize(
    "decorator", [low_precision, full_precision, promote]
)


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return a product in which dtype, order of sums and autocast show."""
    return torch.softmax(x @ w, -1) @ w.mT


def operands(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 5, dtype=dtype, requires_grad=True) for dtype in dtypes]


@pytest.mark.parametrize(("decorator", "regions", "dtypes", "expected"), ROWS)
def test_casts_as_by_hand(
    decorator: Decorator,
    regions: Contexts,
    dtypes: tuple[torch.dtype, ...],
    expected: torch.dtype,
) -> None:
    """Law: under autocast it is the function on cast operands, with autocast off.

    Gradients arrive in the dtype of what was given.
    """
    x, w = operands(*dtypes)
    by_hand = product(x.to(expected), w.to(expected))
    grads = torch.autograd.grad(by_hand.float().square().sum(), (x, w))
    with entered(regions):
        before = autocast_state()
        actual = decorator(product)(x, w)
        assert autocast_state() == before
    assert same_bits(actual, by_hand)
    actual.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert same_bits(x.grad, grads[0])
    assert same_bits(w.grad, grads[1])
    assert (x.grad.dtype, w.grad.dtype) == dtypes  # type: ignore[union-attr]


@DECORATORS
def test_no_copy_without_need(decorator: Decorator) -> None:
    """Law: what cannot be cast is passed as the object it is.

    So is everything while autocast is off.
    """
    x = torch.ones(2)
    untouched: list[object] = [
        *(x.double(), x.int(), x > 0),
        x * 1j,
        x.to(torch.float8_e4m3fn),
        x.to("meta"),
        [None, "word"],
        {"log": []},
        torch.Size([2]),
    ]

    @decorator
    def function(*args: object, last: object) -> tuple[object, ...]:
        return *args, last

    for wanted in (x, x.bfloat16(), x.half()):
        with torch.autocast("cpu"):
            rest = function(wanted, *untouched[:-1], last=untouched[-1])[1:]
            assert all(a is b for a, b in zip(rest, untouched, strict=True))
            with torch.autocast("cpu", enabled=False):
                assert all(each is wanted for each in function(wanted, last=wanted))
        nested = [wanted]
        assert function(nested, last=wanted)[0] is nested
        assert nested[0] is wanted


@DECORATORS
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_runs_with_autocast_off(decorator: Decorator, dtype: torch.dtype) -> None:
    """Law: inside autocast is off, with the region's dtype; a region inside may open.

    Without floating tensors there is no device to speak of: autocast stays on. After an
    error it is as it was before the call.
    """

    @decorator
    def inside(*args: object) -> tuple[object, ...]:
        with torch.autocast("cpu", FP16):
            assert autocast_state()[:2] == (True, FP16)
        if args == ("broken",):
            raise ZeroDivisionError
        return autocast_state()[:2]

    x = torch.ones(2)
    with torch.autocast("cpu", dtype):
        assert inside(x) == inside(3, [{"x": x.double()}]) == (False, dtype)
        assert inside() == inside(torch.arange(2), torch.ones(1) > 0) == (True, dtype)
        assert inside(x.to("meta")) == (True, dtype)
        with pytest.raises(ZeroDivisionError):
            inside("broken")
        assert autocast_state()[:2] == (True, dtype)


leaf = st.one_of(
    st.sampled_from([FP32, BF16, FP16, FP64, torch.int64, torch.bool]).map(
        lambda dtype: torch.ones(2, dtype=dtype)
    ),
    st.integers(),
    st.none(),
    st.text(max_size=3),
)
nested = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(args=st.lists(nested, max_size=3), kwargs=st.dictionaries(st.text(), nested))
def test_nested_casts_are_torchs(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Law: nested arguments are cast, and keep their form, as by torch's custom_fwd."""

    @low_precision
    def function(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=FP16)  # type: ignore[untyped-decorator]
    def theirs(_ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    with torch.autocast("cpu", FP16):
        actual = function(*args, **kwargs)
        expected = theirs(SimpleNamespace(), *args, **kwargs)
    assert tree_structure(actual) == tree_structure(expected)
    for left, right in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(left, Tensor):
            assert same_bits(left, right)
        else:
            assert left == right


@DECORATORS
def test_methods(decorator: Decorator) -> None:
    """Law: it works on methods, on either side of staticmethod, above classmethod.

    `self` stays the object that it is, a dataclass that holds tensors too.
    """

    @dataclass
    class Layer:
        weight: Tensor

        @decorator
        def method(self, x: Tensor) -> tuple[object, torch.dtype]:
            return self, x.dtype

        @staticmethod
        @decorator
        def inner(x: Tensor) -> torch.dtype:
            return x.dtype

        @decorator
        @staticmethod
        def outer(x: Tensor) -> torch.dtype:
            return x.dtype

        @decorator
        @classmethod
        def of_class(cls, x: Tensor) -> tuple[object, torch.dtype]:
            return cls, x.dtype

    x = torch.ones(2)
    layer = Layer(x)
    with torch.autocast("cpu"):
        wanted = decorator(lambda x: x.dtype)(x)
        owner, dtype = layer.method(x)
        assert owner is layer
        assert layer.weight is x
        dtypes = {dtype, layer.inner(x), layer.outer(x), Layer.inner(x), Layer.outer(x)}
        assert dtypes == {wanted}
        assert layer.of_class(x) == Layer.of_class(x) == (Layer, wanted)
    assert wanted == (BF16 if decorator is low_precision else FP32)


@DECORATORS
def test_signature_is_kept(decorator: Decorator) -> None:
    """Law: the wrapper has name, text and, for type checkers too, the signature."""
    wrapped = decorator(product)
    assert (wrapped.__name__, wrapped.__doc__) == ("product", product.__doc__)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        wrapped(torch.ones(2))  # type: ignore[call-arg]


@pytest.mark.gpu
def test_each_device_has_its_own_region() -> None:
    """Law: tensors follow the autocast state and dtype of their own device."""

    @low_precision
    def function(x: Tensor, y: Tensor) -> tuple[object, ...]:
        on = [torch.is_autocast_enabled(each) for each in ("cpu", "cuda")]
        return x.dtype, y.dtype, *on

    x, y = torch.ones(2), torch.ones(2, device="cuda")
    with torch.autocast("cpu", BF16):
        assert function(x, y) == (BF16, FP32, False, False)
        with torch.autocast("cuda", FP16):
            assert function(x, y) == (BF16, FP16, False, False)
            assert function(y, y) == (FP16, FP16, True, False)
            assert torch.is_autocast_enabled("cuda")

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
from torch import Tensor, nn
from torch.library import Library, custom_op
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.checkpoint import checkpoint
from twins import Contexts, autocast_state, entered, same_bits

from halfstep.casting.custom_functions import full_precision, low_precision, promote
from halfstep.errors import UserError

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


# Operators: the oracle is the same one, on operands cast by hand


seen: list[Any] = []
"""What the kernels below got, call by call; each test begins with none."""

LIBRARY = Library("hs_test", "FRAGMENT")  # type: ignore[no-untyped-call]
OPS: Any = torch.ops.hs_test


def define(schema: str) -> None:
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(schema.partition("(")[0], record, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def record(*args: Any, **kwargs: Any) -> Tensor:
    values = [*args, *kwargs.values()]
    seen.append([dtypes_in(value) for value in values])
    return next(value for value in values if torch.is_tensor(value)).sum()


def dtypes_in(value: Any) -> Any:
    if isinstance(value, list):
        return [dtypes_in(item) for item in value]
    return value.dtype if isinstance(value, Tensor) else value


for each in ("one", "far", "kept"):
    define(f"{each}(Tensor x, Tensor y) -> Tensor")
define(
    "many(Tensor x, Tensor? y, Tensor[] rest, *, Tensor? key=None, int n=1) -> Tensor"
)
define("over(Tensor x) -> Tensor")
define("over.pair(Tensor x, Tensor y) -> Tensor")
define("over.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
define("writes(Tensor(a!) x) -> ()")
define("view(Tensor(a) x) -> Tensor(a)")


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


@custom_op("hs_test::matrix", mutates_args=())
def matrix(x: Tensor, w: Tensor) -> Tensor:
    seen.append([x.dtype, w.dtype])
    return x @ w


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w.mT, x.mT @ grad


matrix.register_autograd(_backward, setup_context=_keep)


def matrices() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)


# Which dtype


@pytest.mark.parametrize(
    ("decorator", "low", "given", "expected"),
    [
        (low_precision, BF16, [FP64, FP32], [FP64, BF16]),
        (full_precision, FP16, [FP16, torch.int64], [FP32, torch.int64]),
        (promote, BF16, [BF16, FP32], [FP32, FP32]),
        (promote, FP16, [FP16, torch.bool], [FP16, torch.bool]),
    ],
)
def test_casts(
    decorator: Any, low: torch.dtype, given: list[Any], expected: list[Any]
) -> None:
    """Law: the operator sees the dtypes of its category, at call time; off, its own."""
    decorator(OPS.one)
    x, y = (torch.ones(2, dtype=dtype) for dtype in given)
    with torch.autocast("cpu", low):
        OPS.one(x, y)
        OPS.one.default(y=y, x=x)
        with torch.autocast("cpu", enabled=False):
            OPS.one(x, y)
    OPS.one(x, y)
    assert seen == [expected, expected, given, given]


def test_optional_lists_and_keywords() -> None:
    """Law: optional tensors, lists and keyword arguments are cast like any other."""
    low_precision("hs_test::many")
    x = torch.ones(2)
    with torch.autocast("cpu"):
        OPS.many(x, None, [])
        OPS.many(x, x, [x.double(), x, x.int()], key=x, n=3)
        OPS.many(x, rest=[x], key=None, y=None)
    assert [call[:3] for call in seen] == [
        [BF16, None, []],
        [BF16, BF16, [FP64, BF16, torch.int32]],
        [BF16, None, [BF16]],
    ]
    assert seen[1][3:] == [BF16, 3]


def test_other_devices_are_not_cast() -> None:
    """Law: a tensor on a device that the key is not of stays as it is, and unasked."""
    low_precision(OPS.far)
    x = torch.ones(2)
    with torch.autocast("cpu"):
        OPS.far(x, x.to("meta"))
        OPS.far(x.to("meta"), x)
        promote(OPS.far)
        OPS.far(x.bfloat16(), x.to("meta"))
    assert seen == [[BF16, FP32], [FP32, BF16], [BF16, FP32]]


@pytest.mark.gpu
def test_an_operator_on_each_device() -> None:
    """Law: tensors follow the autocast state and dtype of their own device."""
    low_precision(OPS.far)
    x, y = torch.ones(2), torch.ones(2, device="cuda")
    with torch.autocast("cpu", BF16):
        OPS.far(x, y)
        with torch.autocast("cuda", FP16):
            OPS.far(x, y)
            OPS.far(y, y)
    assert seen == [[BF16, FP32], [BF16, FP16], [FP16, FP16]]


# What is registered


@DECORATORS
def test_returns_what_it_was_given(decorator: Any) -> None:
    """Law: an operator in each of its forms is registered, and returned as it is."""
    for form in (matrix, OPS.matrix, OPS.matrix.default, "hs_test::matrix"):
        assert decorator(form) is form
    with torch.autocast("cpu"):
        matrix(*matrices())
    assert seen == [[BF16, BF16] if decorator is low_precision else [FP32, FP32]]


def test_above_custom_op() -> None:
    """Law: it decorates what `custom_op` makes; made again, the later one counts."""
    for scale, decorator in ((1, full_precision), (2, low_precision)):

        @decorator
        @custom_op("hs_test::again", mutates_args=())
        def again(x: Tensor, scale: int = scale) -> Tensor:
            seen.append([x.dtype, scale])
            return x * scale

        with torch.autocast("cpu"):
            again(torch.ones(2))
    assert seen == [[FP32, 1], [BF16, 2]]


def test_made_again_it_keeps_its_category() -> None:
    """Law: an operator that is only defined again keeps what was registered for it."""

    def make(scale: int) -> Any:
        @custom_op("hs_test::remade", mutates_args=())
        def remade(x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x * scale

        return remade

    low_precision(make(1))
    remade = make(2)
    with torch.autocast("cpu", FP16):
        assert same_bits(remade(torch.ones(2)), torch.full((2,), 2.0, dtype=FP16))
    assert seen == [FP16]


def test_overloads() -> None:
    """Law: all overloads are cast but those that write; one can be named alone."""
    low_precision(OPS.over)
    full_precision(OPS.over.pair)
    x = torch.ones(2)
    with torch.autocast("cpu"):
        OPS.over(x)
        OPS.over(x.half(), x)
        OPS.over(x, out=torch.empty(2))
    assert seen == [[BF16], [FP32, FP32], [FP32, FP32]]


def test_every_device_type() -> None:
    """Law: there is a kernel at each autocast key of torch, and none before."""
    devices = torch._C._autocast_supported_devices()
    keys = [f"Autocast{torch._C._dispatch_key_for_device(d)}" for d in devices]
    assert {"AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS"} <= set(keys)
    # Without a backend of its own that key is where policies cast.
    keys.remove("AutocastPrivateUse1")
    for expected in (False, True):
        for key in keys:
            has = torch._C._dispatch_has_kernel_for_dispatch_key("hs_test::kept", key)
            assert has is expected, key
        low_precision(OPS.kept)


# What is refused


@DECORATORS
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hs_test::nonsense", "op 'hs_test::nonsense' is not registered"),
        (torch.ops.aten.add_, "op 'aten::add_' is torch's own"),
        ("aten::mm", "use a policy rule: 'op:mm="),
        (OPS.writes, "op 'hs_test::writes' writes into an argument"),
        (OPS.view.default, "op 'hs_test::view' writes into an argument or returns"),
        (3, "int is neither a function nor an operator"),
        (nn.Linear, "Linear is neither a function nor an operator"),
    ],
)
def test_refused(decorator: Decorator, target: object, words: str) -> None:
    """Law: what cannot be cast is refused by name."""
    with pytest.raises(UserError, match=words):
        decorator(target)


# Gradients and company


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradients(low: torch.dtype, reentrant: bool | None) -> None:
    """Law: gradients are those by hand, in fp32; recomputation casts alike."""
    x, w = matrices()
    by_hand = matrix(x.to(low), w.to(low))
    expected = torch.autograd.grad(by_hand.float().square().sum(), (x, w))
    low_precision(matrix)
    seen.clear()
    with torch.autocast("cpu", low):
        if reentrant is None:
            y = matrix(x, w)
        else:
            y = checkpoint(matrix, x, w, use_reentrant=reentrant)
    assert same_bits(y, by_hand)
    y.float().square().sum().backward()
    assert same_bits(x.grad, expected[0])
    assert same_bits(w.grad, expected[1])
    assert expected[0].dtype == FP32
    assert seen == [[low, low]] * (1 if reentrant is None else 2)


def test_an_operator_runs_with_autocast_off() -> None:
    """Law: inside, its device's autocast is off, after an error it is on again."""

    @promote
    @custom_op("hs_test::broken", mutates_args=())
    def broken(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        if x.numel():
            raise ZeroDivisionError
        return x.clone()

    with torch.autocast("cpu", FP16):
        broken(torch.ones(0))
        with pytest.raises(ZeroDivisionError):
            broken(torch.ones(2))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == FP16
        broken(torch.ones(0))
    assert seen == [False, False, False]

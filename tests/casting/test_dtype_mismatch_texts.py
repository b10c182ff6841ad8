"""Errors about dtypes by their texts; reading a traceback runs and breaks nothing."""

from __future__ import annotations

import functools
import gc
import linecache
import pickle
import sys
import weakref
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep.casting.dtype_mismatch import DtypeMismatch, explain

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COMPLEX64 = torch.complex64
REFUSED = "expected scalar type Half but found Float"


def error_of(run: Callable[[], object]) -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        run()
    return caught.value


def of(text: str) -> DtypeMismatch | None:
    return explain(RuntimeError(text))


class Refuses(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self) -> None:
        raise RuntimeError(self.text)


ON_CUDA = "Input type ({}) and weight type ({}) should be the same"
MATRICES = "expected m1 and m2 to have the same dtype, but got: {} != {}"
HALF, FLOAT = "torch.cuda.HalfTensor", "torch.cuda.FloatTensor"

HIDDEN_STATE = (
    "Input and hidden tensors are not the same dtype, found input tensor with Half and "
    "hidden tensor with Float"
)
MASK = (
    "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
    "attn_mask.dtype: c10::BFloat16 and  query.dtype: double instead."
)
BAG = (
    "Expected tensor for argument #1 'weight' to have the same type as tensor for "
    f"argument #1 'per_sample_weights'; but type {HALF} does not equal {FLOAT} (while "
    "checking arguments for embedding_bag)"
)
TRACED = (
    "RuntimeError when making fake tensor call\n  Explanation: Dynamo failed to run FX "
    "node: got RuntimeError('expected dtype torch.float32 for `end`, but got dtype "
    "torch.bfloat16')\n  Hint: Please double check your code."
)

TEXTS = [
    (REFUSED, FP16, FP32),
    ("expected scalar type Float but found c10::Half", FP32, FP16),
    ("Found dtype Double but expected Float", FP64, FP32),
    (MATRICES.format("float", "struct c10::Half"), FP32, FP16),
    (MATRICES.format("c10::complex<float>", "float"), COMPLEX64, FP32),
    (MATRICES.format("long int", "double"), torch.int64, FP64),
    (ON_CUDA.format(HALF, FLOAT), FP16, FP32),
    (ON_CUDA.format("CUDABFloat16Type", FLOAT), BF16, FP32),
    (ON_CUDA.format("float", "c10::BFloat16").replace("weight", "bias"), FP32, BF16),
    ("masked_scatter: expected same dtypes but gotHalf and Float", FP16, FP32),
    (HIDDEN_STATE, FP16, FP32),
    (MASK, BF16, FP64),
    (BAG, FP16, FP32),
    (TRACED, FP32, BF16),
    ("both inputs should have same dtype",),
    ("scatter(): Expected self.dtype to be equal to src.dtype",),
    ("quantile() q tensor must be same dtype as the input tensor",),
    ("mixed dtype (CPU): all inputs must share same datatype.",),
    ("mixed dtype (CPU): expect parameter to have scalar type of Float", FP32),
    ("assigned grad has data of a different type",),
]


@pytest.mark.parametrize(("text", "dtypes"), [(text, tuple(d)) for text, *d in TEXTS])
def test_texts(text: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Law: texts of other devices and versions tell the dtypes, and no more."""
    found = explain(error_of(Refuses(text)))
    assert found is not None
    assert (found.operation, found.rule, found.dtypes) == ("", "", dtypes)
    assert str(found).startswith(f"{text}\n-> an operation in the model (Refuses) got ")


ONE_DEVICE = "Expected all tensors to be on the same device, but found cuda:0 and cpu!"
LOOK_ALIKES = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
    "The size of tensor a (3) must match the size of tensor b (2) at dimension 0",
    ONE_DEVICE,
    ON_CUDA.format("torch.FloatTensor", HALF),
    ON_CUDA.format("torch.FloatTensor", "CUDABFloat16Type"),
    "Function 'MulBackward0' returned nan values in its 0th output.",
    "expected scalar type Long but found Float",
    "gather(): Expected dtype int64 for index",
    "index_select(): Expected dtype int32 or int64 for index, but got Float",
    "Expected 'indices' to have scalar type Long, Int; but got torch.FloatTensor",
    MATRICES.format("long int", "int"),
    "result type Float can't be cast to the desired output type Long",
    "quantile() input tensor must be either float or double dtype",
    "Recomputed values have different metadata: torch.float32, torch.bfloat16",
    "torch.nn.functional.binary_cross_entropy is unsafe to autocast.",
    "",
]


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_look_alikes(text: str) -> None:
    """Law: shapes, devices, indices and NaN are another matter.

    Only RuntimeErrors are torch's refusals, whatever they say.
    """
    assert of(text) is None
    assert explain(NotImplementedError(text)) is None
    for error in (ValueError, TypeError, KeyboardInterrupt):
        assert explain(error(REFUSED)) is None


def test_pickle() -> None:
    """Law: it survives the way from a worker process, every attribute with it."""
    sent = DtypeMismatch("text", "mv", "encoder.0", (FP16, FP32), "op:mv=low")
    got = pickle.loads(pickle.dumps(sent))  # noqa: S301 -- our own
    assert (str(got), vars(got)) == ("text", vars(sent))
    assert list(vars(got).values()) == ["mv", "encoder.0", (FP16, FP32), "op:mv=low"]
    # What has been explained passes through the regions around it.
    assert explain(sent) is None


TEXT = "expected scalar type BFloat16 but found Float"


class Plain(Tensor):
    """A subclass, whose calls pass through Python."""


def rows() -> Tensor:
    return torch.rand(2, 2, dtype=BF16)


# Nothing is run, and nothing is kept


class Counting(nn.Module):
    """Counts how often its property is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    @property
    def vector(self) -> Tensor:
        self.asked += 1
        return torch.rand(2)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.mv(rows, self.vector)


class Forbidding(TorchFunctionMode):
    """Lets nobody ask a tensor anything."""

    def __torch_function__(self, *_: object) -> NoReturn:
        message = "a tensor was asked"
        raise ValueError(message)


def test_nothing_is_run() -> None:
    """Law: no property is asked again, and no tensor's own code or mode is run."""
    model, subclass = Counting(), rows().as_subclass(Plain)
    for matrix in (rows(), subclass):
        with pytest.raises(RuntimeError) as caught:
            model(matrix)
        asked = model.asked
        with Forbidding():
            found = explain(caught.value)
        assert model.asked == asked
        assert found is not None
        assert (found.operation, set(found.dtypes)) == ("mv", {BF16, FP32})


def test_nothing_is_kept() -> None:
    """Law: with torch's error gone, nothing holds the tensors of its frames."""
    model, matrix = Counting(), rows()
    held: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(matrix)]
    found = None
    try:
        model(matrix)
    except RuntimeError as error:
        found = explain(error)
    assert found is not None
    assert found.__traceback__ is None
    del model, matrix
    gc.collect()
    assert all(ref() is None for ref in held)


# It never raises


def sprung(*_: object) -> NoReturn:
    message = "a trap was sprung"
    raise ValueError(message)


class Trap:
    __getattribute__ = __eq__ = __hash__ = __bool__ = sprung
    __iter__ = __len__ = __getitem__ = __contains__ = __repr__ = sprung


def recursive() -> nn.Module:
    module = nn.Sequential(Counting())
    module.append(module)
    return module


def without_table() -> nn.Module:
    module = nn.Sequential(Counting())
    module.__dict__["_modules"] = None
    return module


SELVES: list[Callable[[], object]] = [
    Counting,
    Trap,
    lambda: nn.Module.__new__(nn.Module),  # whose `__init__` has not run
    recursive,
    without_table,
    lambda: None,
]


def plainly(self: object, text: str) -> NoReturn:  # noqa: ARG001
    """Raise."""
    raise RuntimeError(text)


def without_self(self: object, text: str) -> NoReturn:
    del self
    raise RuntimeError(text)


def in_exec(self: object, text: str) -> None:
    exec("plainly(self, text)", {"plainly": plainly, "self": self, "text": text})  # noqa: S102 -- the point


def in_this_file(self: object, text: str) -> None:
    """Raise in code that claims to stand at some line of this file."""
    program = "\n" * (len(text) * 7 % 300) + "plainly(self, text, *())"
    names = {"plainly": plainly, "self": self, "text": text}
    exec(compile(program, __file__, "exec"), names)  # noqa: S102 -- the point


def without_positions(self: object, text: str) -> None:
    code = plainly.__code__.replace(co_linetable=b"")
    FunctionType(code, globals())(self, text)


PLACES = [
    plainly,
    without_self,
    in_exec,
    in_this_file,
    without_positions,
]


@given(
    place=st.sampled_from(PLACES),
    make=st.sampled_from(SELVES),
    # Without letters: a dtype's name would be one more.
    around=st.text(st.characters(exclude_categories=["L", "Cs"]), max_size=60),
    wild=st.none() | st.integers(-(2**31), 2**31 - 1),
)
def test_never_raises(
    place: Callable[[Any, str], object],
    make: Callable[[], object],
    around: str,
    wild: int | None,
) -> None:
    """Law: whatever the traceback, there is an answer, after torch's own text."""
    with pytest.raises(RuntimeError) as caught:
        place(make(), f"{TEXT} {around}")
    error = caught.value
    if wild is not None:
        step = TracebackType(error.__traceback__, sys._getframe(), wild, wild)
        error.__traceback__ = step
    found = explain(error)
    assert found is not None
    assert str(found).startswith(f"{TEXT} {around}".rstrip())
    assert (found.operation, found.rule) == ("", "")
    assert found.dtypes[:2] == (BF16, FP32)


def test_long_chain() -> None:
    """Law: a call that nests too deeply to be read tells less, and does no harm."""
    for length, operation in ((20, "mv"), (900, "")):
        source = f"torch.mv(a{'.t()' * length}, b)"
        names = {"torch": torch, "a": rows(), "b": torch.rand(2)}
        file = f"<{length}>"
        linecache.cache[file] = len(source), None, [source], file
        run = functools.partial(exec, compile(source, file, "exec"), names)
        found = explain(error_of(run))
        assert found is not None
        assert (found.operation, set(found.dtypes)) == (operation, {BF16, FP32})

"""Refused operands, read from text and traceback: nothing else is run or broken."""

import functools
import gc
import importlib.util
import linecache
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import group_of_one
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep.casting.dtype_mismatch import DtypeMismatch, explain

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Mixer(nn.Module):
    """Multiplies by an fp32 vector in a way that no table of the CPU casts."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.rand(2))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.mv(rows, self.vector)


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Mixer()))


def found_in(run: Callable[..., object], *args: object) -> DtypeMismatch:
    with pytest.raises(RuntimeError) as caught:
        run(*args)
    found = explain(caught.value)
    assert found is not None, caught.value
    return found


def line_of(found: DtypeMismatch) -> str:
    return str(found).splitlines()[1]


def rows() -> Tensor:
    return torch.rand(2, 2, dtype=BF16)


def test_innermost_module() -> None:
    """Law: the path leads from the outermost module to the innermost.

    A module in two places has the path that `named_modules` gives it.
    """
    model = nested()
    model.alias = model[1]
    found = found_in(model, rows())
    assert line_of(found) == (
        "-> mv in module '1.1' (Mixer) got bfloat16 (rows), float32 (vector). Fix it "
        "with the policy rule 'op:mv=low', or cast by hand."
    )
    assert (found.operation, found.module, found.rule) == ("mv", "1.1", "op:mv=low")
    assert found.dtypes == (BF16, FP32)
    assert found_in(model.alias, rows()).module == "1"


class Compiled(nn.Module):
    """Calls a model as torch.compile's wrapper does where it cannot trace it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, rows: Tensor) -> Tensor:
        return self._orig_mod(rows)


def test_wrappers() -> None:
    """Law: data parallelism's and torch.compile's wrappers are no part of the path."""
    with group_of_one():
        ddp = nn.parallel.DistributedDataParallel(nested())
        for wrapped in (ddp, nn.DataParallel(nested()), Compiled(nested())):
            assert found_in(wrapped, rows()).module == "1.1"


class Hoarder(nn.Module):
    """Keeps a mixer where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential()
        self.hidden = [Mixer()]

    def forward(self, rows: Tensor) -> Tensor:
        return self.hidden[0](rows)


def test_unregistered_module() -> None:
    """Law: a module that the model does not hold has no path: the one around it is."""
    found = found_in(nn.Sequential(nn.Identity(), Hoarder()), rows())
    assert found.module == "1"
    assert " in module '1' (Hoarder) got " in line_of(found)


class Late(Mixer):
    again = False

    def forward(self, rows: Tensor) -> Tensor:
        vector = self.vector.bfloat16() if self.again else self.vector
        self.again = True
        return torch.mv(rows, vector)


def test_recomputation() -> None:
    """Law: a forward pass that runs again in backward is one: rules do reach it."""
    matrix = torch.rand(2, 2, requires_grad=True)
    model = nn.Sequential(nn.Identity(), Late())
    out = checkpoint(model, matrix, use_reentrant=True)
    found = found_in(out.sum().backward)
    assert (found.operation, found.module, found.rule) == ("mv", "1", "op:mv=low")


class Opaque(nn.Module):
    """Calls a module whose code no traceback shows, under an operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.forward = functools.partial(torch.mv)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows, torch.rand(2))


def test_module_is_no_operation() -> None:
    """Law: a module that is called like an operation is not taken for it."""
    found = found_in(Opaque(), rows())
    assert (found.operation, found.module, found.rule) == ("", "norm", "")


# Frames that hand a call on, and source that tells nothing


class Passing(TorchFunctionMode):
    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call."""
        return call(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {})


class Plain(Tensor):
    """A subclass, whose calls pass through Python."""


def mv(*args: Tensor) -> object:
    """Run an operation as a kernel in Python does."""
    return run_with(torch.ops.aten.mv.default, args)


def run_with(op: Callable[..., object], args: tuple[Tensor, ...]) -> object:
    return op(*args)


MATRIX, VECTOR = rows(), torch.rand(2)
HANDED_ON: dict[str, Callable[[], object]] = {
    "mv, a subclass": lambda: Mixer()(MATRIX.as_subclass(Plain)),
    "matmul": lambda: MATRIX @ VECTOR.as_subclass(Plain),
    "layer_norm": lambda: functional.layer_norm(
        VECTOR.as_subclass(Plain), (2,), MATRIX[0]
    ),
    "mv, a kernel in Python": lambda: mv(MATRIX, VECTOR),
    # As exported graphs call them.
    "mv, an overload": lambda: torch.ops.aten.mv.default(MATRIX, VECTOR),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_handed_on(name: str) -> None:
    """Law: modes, subclasses and kernels in Python do not hide which operation it was.

    Outside of modules nothing is said about one.
    """
    operation = name.partition(",")[0]
    for mode in (torch.device("cpu"), Passing()):
        with mode:
            found = found_in(HANDED_ON[name])
        assert found.operation == operation
        assert set(found.dtypes) == {BF16, FP32}
        assert found.rule.startswith(f"op:{operation}=") or operation == "matmul"
    assert found.module == ""


def test_without_source() -> None:
    """Law: without source the dtypes are torch's own words, and nothing is named."""
    names = {"torch": torch, "a": VECTOR, "b": MATRIX}
    found = found_in(exec, "torch.mv(b, a)", names)
    assert (found.operation, found.rule) == ("", "")
    assert set(found.dtypes) == {BF16, FP32}
    assert str(found).endswith("Cast them to one dtype by hand.")


def test_edited_source(tmp_path: Path) -> None:
    """Law: a file that has changed since it was imported makes nobody a culprit."""
    file = tmp_path / "edited_since.py"
    file.write_text("import torch\ndef run(a, b):\n    return torch.mv(a, b)\n")
    spec = importlib.util.spec_from_file_location("edited_since", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for text in ("import torch\ndef run(a, b):\n    return torch.mm(a, b)\n", "def"):
        file.write_text(text)
        assert found_in(module.run, MATRIX, VECTOR).operation == ""


# Errors by their texts

COMPLEX64 = torch.complex64
REFUSED = "expected scalar type Half but found Float"


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
    found = found_in(Refuses(text))
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
    assert found.__traceback__ is None
    del model, matrix
    gc.collect()
    assert all(ref() is None for ref in held)


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


def without_positions(self: object, text: str) -> None:
    code = plainly.__code__.replace(co_linetable=b"")
    FunctionType(code, globals())(self, text)


PLACES = [plainly, without_self, in_exec, without_positions]


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
        found = found_in(run)
        assert (found.operation, set(found.dtypes)) == (operation, {BF16, FP32})

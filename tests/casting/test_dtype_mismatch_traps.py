"""Reading a traceback runs nothing, keeps nothing and never fails."""

from __future__ import annotations

import gc
import linecache
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

from halfstep.casting.dtype_mismatch import explain

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, FP32 = torch.bfloat16, torch.float32
TEXT = "expected scalar type BFloat16 but found Float"


class Plain(Tensor):
    """A subclass, whose calls pass through Python."""


def rows() -> Tensor:
    """Return what an fp32 vector cannot be multiplied with."""
    return torch.rand(2, 2, dtype=BF16)


# Nothing is run, and nothing is kept


class Counting(nn.Module):
    """Counts how often its property is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    @property
    def vector(self) -> Tensor:
        """An fp32 vector."""
        self.asked += 1
        return torch.rand(2)

    def forward(self, rows: Tensor) -> Tensor:
        """Fail."""
        return torch.mv(rows, self.vector)


class Forbidding(TorchFunctionMode):
    """Lets nobody ask a tensor anything."""

    def __torch_function__(self, *_: object) -> NoReturn:
        """Raise."""
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
    assert found is not None
    values = [*vars(found).values(), *found.dtypes, *found.args]
    assert {type(value) for value in values} == {str, tuple, torch.dtype}


# It never raises


def sprung(*_: object) -> NoReturn:
    """Raise."""
    message = "a trap was sprung"
    raise ValueError(message)


class Trap:
    """Raises whatever is done to it."""

    __getattribute__ = __eq__ = __hash__ = __bool__ = sprung
    __iter__ = __len__ = __getitem__ = __contains__ = __repr__ = sprung


def uninitialised() -> nn.Module:
    """Return a module whose `__init__` has not run."""
    return nn.Module.__new__(nn.Module)


def recursive() -> nn.Module:
    """Return a module that contains itself."""
    module = nn.Sequential(Counting())
    module.append(module)
    return module


def without_table() -> nn.Module:
    """Return a module whose table of submodules is gone."""
    module = nn.Sequential(Counting())
    module.__dict__["_modules"] = None
    return module


SELVES: list[Callable[[], object]] = [
    Counting,
    Trap,
    uninitialised,
    recursive,
    without_table,
    lambda: None,
]


def plainly(self: object, text: str) -> NoReturn:  # noqa: ARG001
    """Raise."""
    raise RuntimeError(text)


def without_self(self: object, text: str) -> NoReturn:
    """Raise where the name is gone."""
    del self
    raise RuntimeError(text)


def in_exec(self: object, text: str) -> None:
    """Raise where there is no source."""
    exec("plainly(self, text)", {"plainly": plainly, "self": self, "text": text})  # noqa: S102 -- the point


def in_this_file(self: object, text: str) -> None:
    """Raise in code that claims to stand at some line of this file."""
    program = "\n" * (len(text) * 7 % 300) + "plainly(self, text, *())"
    names = {"plainly": plainly, "self": self, "text": text}
    exec(compile(program, __file__, "exec"), names)  # noqa: S102 -- the point


def without_positions(self: object, text: str) -> None:
    """Raise in code that does not know its lines."""
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


def run_as(source: str, names: dict[str, object]) -> RuntimeError:
    """Return what a text raises whose lines a traceback can show."""
    file = f"<{source[:20]} {id(names)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    with pytest.raises(RuntimeError) as caught:
        exec(compile(source, file, "exec"), names)  # noqa: S102 -- the point
    return caught.value


def test_long_chain() -> None:
    """Law: a call that nests too deeply to be read tells less, and does no harm."""
    for length, operation in ((20, "mv"), (900, "")):
        source = f"torch.mv(a{'.t()' * length}, b)"
        names = {"torch": torch, "a": rows(), "b": torch.rand(2)}
        found = explain(run_as(source, names))
        assert found is not None
        assert (found.operation, set(found.dtypes)) == (operation, {BF16, FP32})

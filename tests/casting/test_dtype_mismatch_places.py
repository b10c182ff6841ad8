"""Where an operation refused its operands: module, operation and names of operands."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import group_of_one
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep.casting.dtype_mismatch import DtypeMismatch, explain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BF16, FP32 = torch.bfloat16, torch.float32


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


# Modules


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
        out: Tensor = self._orig_mod(rows)
        return out


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
        out: Tensor = self.hidden[0](rows)
        return out


def test_unregistered_module() -> None:
    """Law: a module that the model does not hold has no path: the one around it is."""
    found = found_in(nn.Sequential(nn.Identity(), Hoarder()), rows())
    assert found.module == "1"
    assert " in module '1' (Hoarder) got " in line_of(found)


class Crooked(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        vector = torch.rand(2, dtype=BF16)
        return torch.mv(grad, vector)


class Trainer(nn.Module):
    def forward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)


def test_backward() -> None:
    """Law: rules do not reach backward code; who calls backward is no culprit."""
    weight = torch.rand(2, 2, requires_grad=True)
    out: Tensor = Crooked.apply(weight)  # type: ignore[no-untyped-call]
    found = found_in(Trainer(), out.sum())
    assert line_of(found).startswith(
        "-> mv in Crooked.backward got float32 (grad), bfloat16 (vec"
    )
    assert (found.module, found.rule) == ("", "")


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
        out: Tensor = self.norm(rows, torch.rand(2))
        return out


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
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for text in ("import torch\ndef run(a, b):\n    return torch.mm(a, b)\n", "def"):
        file.write_text(text)
        assert found_in(module.run, MATRIX, VECTOR).operation == ""

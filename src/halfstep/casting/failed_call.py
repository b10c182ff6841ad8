"""Finds the call in the user's code that failed, from the frames of a traceback.

It never runs user code (no property, no `__getattr__`) and keeps no reference to frames
or tensors.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections import ChainMap
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType

    Frames = list[tuple[FrameType, int]]  # (frame, byte offset of the instruction)
    Scope = Mapping[str, object]

T = TypeVar("T")

_METHODS = ("forward", "backward", "vjp")

# The module


def frames_of(error: BaseException) -> tuple[Frames, bool]:
    """Return (frames, in_backward), outermost first, of the last backward if any."""
    frames: Frames = []
    in_backward = False
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "_engine_run_backward":
            frames, in_backward = [], True
        else:
            frames.append((step.tb_frame, step.tb_lasti))
        step = step.tb_next
    return frames, in_backward


def innermost_module(frames: Frames) -> tuple[str, nn.Module | None]:
    """Return (path, module) of the innermost `self` that is a module of the model."""
    owners = (
        f.f_locals.get("self") for f, _ in frames if "self" in f.f_code.co_varnames
    )
    modules = [value for value in owners if is_instance(value, nn.Module)]
    if not modules:
        return "", None
    model = _unwrapped(modules[0])
    paths = _paths(model)
    module = next((m for m in reversed(modules) if id(m) in paths), model)
    return paths[id(module)], module


def custom_function(frames: Frames) -> tuple[str, str]:
    """Return (name, method) of the innermost autograd.Function; ("", "") if none."""
    for frame, _ in reversed(frames):
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if is_instance(first, nn.Module):  # run inside a Function, as checkpoints do
            break
        if is_instance(first, BackwardCFunction) and code.co_name in _METHODS:
            return cast("Any", type(first))._forward_cls.__name__, code.co_name  # noqa: SLF001
    return "", ""


def is_instance(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return isinstance by `type(value)`: reading `__class__` may run a property."""
    return issubclass(type(value), kind)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside wrappers of data parallelism and torch.compile."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    name = "module" if issubclass(type(module), parallel) else "_orig_mod"
    inner = _raw_table(module, "_modules").get(name)
    return _unwrapped(inner) if is_instance(inner, nn.Module) else module


def _paths(model: nn.Module) -> dict[int, str]:
    """Return id -> path of every module, as in `named_modules`."""
    paths: dict[int, str] = {}
    to_visit = [("", model)]
    while to_visit:
        path, module = to_visit.pop()
        if id(module) not in paths:
            paths[id(module)] = path
            for name, child in reversed(_raw_table(module, "_modules").items()):
                if is_instance(child, nn.Module):
                    to_visit.append((f"{path}.{name}".lstrip("."), child))
    return paths


def _raw_table(module: nn.Module, table: str) -> dict[str, object]:
    """Return a module's parameters, buffers or submodules, bypassing its class."""
    contents = object.__getattribute__(module, "__dict__").get(table)
    return dict(dict.items(contents)) if is_instance(contents, dict) else {}


# The call


@dataclass(frozen=True)
class FailedCall:
    """A call of an operation in the source; fields are empty if unknown."""

    operation: str = ""
    operands: tuple[tuple[str, Tensor], ...] = ()
    """(name in the source, tensor)."""
    writes: bool = False
    """Whether it writes in place or to `out=`; rules do not apply to such calls."""
    numbers: tuple[float, ...] = ()
    """Numbers among the arguments."""


_VIEWS = (
    *("T", "mT", "H", "mH", "data", "t", "transpose", "permute", "view", "view_as"),
    *("reshape", "flatten", "squeeze", "unsqueeze", "expand", "contiguous", "detach"),
)
"""Attributes and methods of a tensor that preserve its dtype."""


def failed_call(frames: Frames) -> FailedCall:
    """Return the call that failed, read from the source of the innermost frame."""
    for frame, instruction in reversed(frames):
        # Outside of functions, f_locals may be a mapping of the user's own class.
        own = frame.f_locals if frame.f_code.co_flags & inspect.CO_OPTIMIZED else {}
        scope = ChainMap(own, frame.f_globals)
        match _expression(frame, instruction):
            case ast.BinOp(left, ast.MatMult(), right):
                return FailedCall("matmul", _operands([left, right], scope))
            case ast.Subscript() as target:
                return FailedCall("index_put_", _operands([target], scope), writes=True)
            case ast.Call(callee, args, keywords):
                if name := _operation(callee, frame, scope):
                    # x in x.addmv(...) is an operand; F in F.linear(...) is no tensor.
                    owner = [callee.value] if isinstance(callee, ast.Attribute) else []
                    nodes = [*owner, *args, *(keyword.value for keyword in keywords)]
                    out = any(keyword.arg == "out" for keyword in keywords)
                    writes = out or name.endswith("_")
                    numbers = tuple(_numbers(nodes, scope))
                    return FailedCall(name, _operands(nodes, scope), writes, numbers)
                # `func(*args)` or `run(op, args)`: the caller's frame says more.
                names = [getattr(arg, "id", type(arg)) for arg in args]
                if "args" in names or ast.Starred in names:
                    continue
        break
    return FailedCall()


def _expression(frame: FrameType, instruction: int) -> ast.expr | None:
    """Return the expression of an instruction; None if there is no source."""
    positions = dict(enumerate(frame.f_code.co_positions()))
    line, last, start, end = positions.get(instruction // 2, (None,) * 4)
    if line is None or last is None or start is None or end is None:
        return None
    try:
        lines = linecache.getlines(frame.f_code.co_filename)[line - 1 : last]
        source = [text.encode() for text in lines]  # columns are byte offsets
        source[-1] = source[-1][:end]
        source[0] = source[0][start:]
        text = b"".join(source).decode()[:1000]  # longer ones might nest too deeply
        return ast.parse(f"({text})", mode="eval").body
    except (IndexError, SyntaxError, ValueError):
        return None  # no file, or it has changed since it was imported


def _operation(callee: ast.expr, frame: FrameType, scope: Scope) -> str:
    """Return the aten name of a call's operation, "" if it calls something else."""
    names = [getattr(callee, "attr", getattr(callee, "id", ""))]
    value, code = _static_value(callee, scope)[1], frame.f_code
    if names[0] not in (*code.co_names, *code.co_varnames, *code.co_freevars):
        return ""  # the file has changed since it was imported
    if type(value) in (BuiltinFunctionType, MethodDescriptorType):
        names.insert(0, cast("Any", value).__name__)  # linalg_solve, called as solve
    elif is_instance(value, OpOverload) and isinstance(callee, ast.Attribute):
        names.append(getattr(callee.value, "attr", ""))  # torch.ops.aten.mm.default
    called = not is_instance(value, nn.Module)
    return next((n for n in names if called and hasattr(torch.ops.aten, n)), "")


def _operands(
    nodes: Iterable[ast.expr], scope: Scope
) -> tuple[tuple[str, Tensor], ...]:
    """Return (name, tensor) of expressions, tensors in lists included."""
    named_values: list[tuple[str, object]] = []
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple):
            named_values += _operands(node.elts, scope)
        elif isinstance(node, ast.Starred):
            named_values += [("", item) for _, item in _operands([node.value], scope)]
        else:
            name, value = _static_value(node, scope)
            items = value if type(value) in (list, tuple) else [value]
            named_values += [(name, item) for item in cast("list[object]", items)]
    return tuple(
        (name, item) for name, item in named_values if is_instance(item, Tensor)
    )


def _numbers(nodes: Iterable[ast.expr], scope: Scope) -> Iterator[float]:
    """Yield the numbers among expressions, literals and variables."""
    for node in nodes:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield from (-each for each in _numbers([node.operand], scope))
            continue
        value = _static_value(node, scope)[1]
        if isinstance(node, ast.Constant):
            value = node.value
        if type(value) in (int, float):
            yield cast("float", value)


def _static_value(node: ast.expr, scope: Scope) -> tuple[str, object]:
    """Return (name, value) of an expression; None if that needs running code."""
    match node:
        case ast.Name(name):
            return name, scope.get(name)
        case ast.Attribute(inner, name):
            label, owner = _static_value(inner, scope)
            if is_instance(owner, Tensor):
                return label, owner if name in _VIEWS else None
            if is_instance(owner, nn.Module):
                for table in ("_parameters", "_buffers", "_modules"):
                    if name in (contents := _raw_table(owner, table)):
                        return name, contents[name]
            # For a property, this returns the property object.
            return name, inspect.getattr_static(owner, name, None)
        case ast.Subscript(inner) | ast.Call(ast.Attribute() as inner):
            label, owner = _static_value(inner, scope)
            return label, owner if is_instance(owner, Tensor) else None
    return "", None

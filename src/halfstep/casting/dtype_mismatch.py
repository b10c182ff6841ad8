"""Why an operation refused the dtypes of its operands, and which rule mends it.

In: an exception on its way out of a region. Out: a `DtypeMismatch` that says which
operation, in which module, with which dtypes; None if it is about something else.

A post-mortem: it reads torch's text and the frames of the traceback. Nothing of the
user's runs, neither property nor `__getattr__`, and no frame or tensor is kept.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections import ChainMap
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from halfstep.policy.op_tables import FP32, LEAN, LOW, PROMOTE, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    Frames = list[tuple[FrameType, int]]  # with the instruction each stopped at
    Got = dict[torch.dtype, list[str]]  # with the names of its operands
    Scope = Mapping[str, object]

T = TypeVar("T")


class DtypeMismatch(RuntimeError):  # noqa: N818 -- a public name of the API
    """torch's own error, with the operation, the module, the dtypes and the cure.

    Args:
        message: torch's text, then one line of ours.
        operation: aten's name, "" if it cannot be told.
        module: Path in the model; "" is the model itself, or unknown.
        dtypes: The different dtypes, in the order of the operands, as far as known.
        rule: The policy rule that mends it ("op:addmv=low"), "" if none does.
    """

    def __init__(
        self,
        message: str,
        operation: str = "",
        module: str = "",
        dtypes: tuple[torch.dtype, ...] = (),
        rule: str = "",
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.module = module
        self.dtypes = dtypes
        self.rule = rule


def explain(error: BaseException) -> DtypeMismatch | None:
    """Return what to raise from an error about mismatching dtypes, else None.

    Why: torch says "expected m1 and m2 to have the same dtype", and leaves it to the
    user to find which of a hundred layers that was, and what would have cast it.

    Args:
        error: Any exception, its traceback still attached. What has been explained is
            not explained again.
    """
    text, text_dtypes = _mismatch_in(error)
    if text_dtypes is None:
        return None
    frames, in_backward = _frames(error)
    call = _failed_call(frames)
    path, module = _innermost_module(frames)
    names_by_dtype = _names_by_dtype(call, text_dtypes)
    if in_backward and module is None:
        rule, advice = "", "No rule reaches a backward pass: cast by hand."
    else:
        rule, advice = _fix_for(call, names_by_dtype, text_dtypes, text)
    module_text = f"module '{path}'" if path else "the model"
    where = "" if module is None else f" in {module_text} ({type(module).__name__})"
    message = (
        f"{text.rstrip()}\n-> {call.operation or 'an operation'}{where} got "
        f"{_operand_text(names_by_dtype) or 'operands of different dtypes'}. {advice}"
    )
    return DtypeMismatch(message, call.operation, path, tuple(names_by_dtype), rule)


def is_about_dtypes(error: BaseException) -> bool:
    """Say whether torch refused a mix of dtypes, and nobody has explained it yet.

    Its recurrent layers do so with a ValueError.
    """
    if type(error) is ValueError:
        error = RuntimeError(*error.args)
    return _mismatch_in(error)[1] is not None


# What torch says


def _mismatch_in(error: BaseException) -> tuple[str, tuple[torch.dtype, ...] | None]:
    """Return torch's text, and the dtypes in it if it is about mismatching ones."""
    # A class of the user's own must arrive as it is.
    package = type(error).__module__.partition(".")[0]
    if not isinstance(error, RuntimeError) or package not in {"builtins", "torch"}:
        return "", None
    text = next((arg for arg in error.args if isinstance(arg, str)), "")
    return text, _mismatched_dtypes(text)


_PROMOTE_ERROR = "at::autocast::prioritize"

_MISMATCH = re.compile(
    rf"(?P<bare>{_PROMOTE_ERROR}|inputs should have same dtype|must share same datatype"
    r"|self.dtype to be equal to|expect parameter to have scalar type"
    r"|tensor must be same dtype as|grad has data of a different type)"
    r"|same (scalar |data ?)?d?types?\b|type.{1,80} (must|should) be the same"
    r"|dtypes match|must have the type|d(oes|id) not (match|equal)|match query dtype"
    r"|Type promoting not"
    r"|[Ff]ound dtype|out tensor to have dtype|gradient with dtype"
    r"|[Ee]xpected (object of )?(scalar type|dtype) (?!Long|Int|Byte|(torch\.)?u?int)"
)
"""What marks a text about mismatching dtypes. It must name two, but for the bare ones.
Where an integer type is expected, an index or a target is wrong, not a precision."""

_NAMES = {
    torch.bfloat16: "BFloat16 bfloat16",
    torch.float16: "Half float16",
    torch.float32: "Float float32 float",
    torch.float64: "Double float64 double",
    torch.complex64: "ComplexFloat complex64 complex<float>",
    torch.complex128: "ComplexDouble complex128 complex<double>",
    torch.int64: "Long int64 long",
    torch.int32: "Int int32 int",
}
"""Dtype -> its names in texts: scalar type, Python's and C++'s."""

_DTYPE_OF = {name: dtype for dtype, names in _NAMES.items() for name in names.split()}

# "CPUBFloat16Type", "torch.cuda.HalfTensor", and a text that lacks a space: "gotHalf".
_WORD = re.compile(
    r"((?:Complex)?(?:BFloat16|Half|Float|Double)|Long|Int)(?=Type\b|Tensor\b|\b)"
    r"|\b(complex<[\w:]+>|[a-z]+\d*\b)"
)

_ON = re.compile(r"torch\.(?:(\w+)\.)?\w+Tensor|\b(CPU|CUDA|MPS|XPU)\w+Type")


def _mismatched_dtypes(text: str) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes in a text about mismatching ones; None: no such text."""
    match = next(filter(None, map(_MISMATCH.search, text.splitlines())), None)
    if match is None:
        return None
    line = match.string
    if len({(on[1] or on[2] or "CPU").upper() for on in _ON.finditer(line)}) > 1:
        return None  # they are on two devices: no cast would mend that
    # What was got counts: what was expected may be a list of all that is allowed.
    dtypes = _dtypes_in(re.split(r"\b[Gg]ot|\b[Ff]ound", line)[-1])
    dtypes = dtypes if len(dtypes) > 1 else _dtypes_in(line)
    is_mixed = len(dtypes) > 1 and any(
        t.is_floating_point or t.is_complex for t in dtypes
    )
    return dtypes if is_mixed or match["bare"] else None


def _dtypes_in(text: str) -> tuple[torch.dtype, ...]:
    words = _WORD.finditer(text.replace("long int", "long"))
    dtypes = (_DTYPE_OF.get(word[1] or word[2]) for word in words)
    return tuple(dict.fromkeys(dtype for dtype in dtypes if dtype))


# In which module it happened


def _frames(error: BaseException) -> tuple[Frames, bool]:
    """Return the frames, outermost first, of the last backward pass if there is one."""
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


def _innermost_module(frames: Frames) -> tuple[str, nn.Module | None]:
    """Return path and module of the innermost `self` that belongs to the model."""
    owners = (
        f.f_locals.get("self") for f, _ in frames if "self" in f.f_code.co_varnames
    )
    modules = [value for value in owners if _is_instance(value, nn.Module)]
    if not modules:
        return "", None
    model = _unwrapped(modules[0])
    paths = _paths(model)
    module = next((m for m in reversed(modules) if id(m) in paths), model)
    return paths[id(module)], module


def _is_instance(value: object, kind: type[T]) -> TypeGuard[T]:
    # isinstance would ask the value for its __class__, which may be a property.
    return issubclass(type(value), kind)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside data parallelism's and torch.compile's wrappers."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    name = "module" if issubclass(type(module), parallel) else "_orig_mod"
    inner = _raw_table(module, "_modules").get(name)
    return _unwrapped(inner) if _is_instance(inner, nn.Module) else module


def _paths(model: nn.Module) -> dict[int, str]:
    """Return id -> path of every module, as `named_modules` gives them."""
    paths: dict[int, str] = {}
    to_visit = [("", model)]
    while to_visit:
        path, module = to_visit.pop()
        if id(module) not in paths:
            paths[id(module)] = path
            for name, child in reversed(_raw_table(module, "_modules").items()):
                if _is_instance(child, nn.Module):
                    to_visit.append((f"{path}.{name}".lstrip("."), child))
    return paths


def _raw_table(module: nn.Module, table: str) -> dict[str, object]:
    """Return a module's parameters, buffers or modules, whatever its class makes."""
    contents = object.__getattribute__(module, "__dict__").get(table)
    return dict(dict.items(contents)) if _is_instance(contents, dict) else {}


# Which call it was


@dataclass(frozen=True)
class _Call:
    operation: str = ""
    operands: tuple[tuple[str, Tensor], ...] = ()
    """Names in the source, and what they name."""
    writes: bool = False
    """In place, or to out=: no rule reaches those."""


_VIEWS = (
    *("T", "mT", "H", "mH", "data", "t", "transpose", "permute", "view", "view_as"),
    *("reshape", "flatten", "squeeze", "unsqueeze", "expand", "contiguous", "detach"),
)
"""Attributes and methods of a tensor whose value has the tensor's dtype."""


def _failed_call(frames: Frames) -> _Call:
    """Return the call that failed, read from the source of the innermost frame."""
    for frame, instruction in reversed(frames):
        # Where names are no function's own, a mapping of the user's may hold them.
        own = frame.f_locals if frame.f_code.co_flags & inspect.CO_OPTIMIZED else {}
        scope = ChainMap(own, frame.f_globals)
        match _expression(frame, instruction):
            case ast.BinOp(left, ast.MatMult(), right):
                return _Call("matmul", _operands([left, right], scope))
            case ast.Subscript() as target:
                return _Call("index_put_", _operands([target], scope), writes=True)
            case ast.Call(callee, args, keywords):
                if name := _operation(callee, frame, scope):
                    # x of x.addmv(...) is an operand; F of F.linear(...) is no tensor.
                    owner = [callee.value] if isinstance(callee, ast.Attribute) else []
                    nodes = [*owner, *args, *(keyword.value for keyword in keywords)]
                    out = any(keyword.arg == "out" for keyword in keywords)
                    writes = out or name.endswith("_")
                    return _Call(name, _operands(nodes, scope), writes)
                # `func(*args)` or `run(op, args)`: whoever calls that knows more.
                names = [getattr(arg, "id", type(arg)) for arg in args]
                if "args" in names or ast.Starred in names:
                    continue
        break
    return _Call()


def _expression(frame: FrameType, instruction: int) -> ast.expr | None:
    """Return the expression that an instruction belongs to, None without source."""
    positions = dict(enumerate(frame.f_code.co_positions()))
    line, last, start, end = positions.get(instruction // 2, (None,) * 4)
    if line is None or last is None or start is None or end is None:
        return None
    try:
        lines = linecache.getlines(frame.f_code.co_filename)[line - 1 : last]
        source = [text.encode() for text in lines]  # columns are counted in bytes
        source[-1] = source[-1][:end]
        source[0] = source[0][start:]
        text = b"".join(source).decode()[:1000]  # a longer one might nest too deeply
        return ast.parse(f"({text})", mode="eval").body
    except (IndexError, SyntaxError, ValueError):
        return None  # no file, or not the one that was imported


def _operation(callee: ast.expr, frame: FrameType, scope: Scope) -> str:
    """Return aten's name for what a call calls, "" if that is no operation."""
    names = [getattr(callee, "attr", getattr(callee, "id", ""))]
    value, code = _static_value(callee, scope)[1], frame.f_code
    if names[0] not in (*code.co_names, *code.co_varnames, *code.co_freevars):
        return ""  # the file was edited since
    if type(value) in (BuiltinFunctionType, MethodDescriptorType):
        names.insert(0, cast("Any", value).__name__)  # linalg_solve, called as solve
    elif _is_instance(value, OpOverload) and isinstance(callee, ast.Attribute):
        names.append(getattr(callee.value, "attr", ""))  # torch.ops.aten.mm.default
    called = not _is_instance(value, nn.Module)
    return next((n for n in names if called and hasattr(torch.ops.aten, n)), "")


def _operands(
    nodes: Iterable[ast.expr], scope: Scope
) -> tuple[tuple[str, Tensor], ...]:
    """Return the tensors that expressions name, those in their lists included."""
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
        (name, item) for name, item in named_values if _is_instance(item, Tensor)
    )


def _static_value(node: ast.expr, scope: Scope) -> tuple[str, object]:
    """Return name and value of an expression, None if only running it would tell."""
    match node:
        case ast.Name(name):
            return name, scope.get(name)
        case ast.Attribute(inner, name):
            label, owner = _static_value(inner, scope)
            if _is_instance(owner, Tensor):
                return label, owner if name in _VIEWS else None
            if _is_instance(owner, nn.Module):
                for table in ("_parameters", "_buffers", "_modules"):
                    if name in (contents := _raw_table(owner, table)):
                        return name, contents[name]
            # A property comes as the property.
            return name, inspect.getattr_static(owner, name, None)
        case ast.Subscript(inner) | ast.Call(ast.Attribute() as inner):
            label, owner = _static_value(inner, scope)
            return label, owner if _is_instance(owner, Tensor) else None
    return "", None


# What mends it

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts: neither float64 nor complex nor integers."""

_DTYPE = inspect.getattr_static(Tensor, "dtype")


def _names_by_dtype(call: _Call, text_dtypes: tuple[torch.dtype, ...]) -> Got:
    """Return dtype -> names of operands; torch's text tells what the frame does not."""
    names_by_dtype: Got = {}
    # Subclasses of Tensor, and modes, may otherwise answer for it.
    with torch._C.DisableTorchFunction():  # noqa: SLF001 -- documented, and not public
        for name, tensor in call.operands:
            dtype = _DTYPE.__get__(tensor)
            if dtype.is_floating_point or dtype.is_complex or dtype in text_dtypes:
                names_by_dtype.setdefault(dtype, []).append(name)
    is_complete = len(names_by_dtype) > 1 and all(
        dtype in names_by_dtype or dtype in _CASTABLE for dtype in text_dtypes
    )
    return (
        names_by_dtype
        if is_complete or not text_dtypes
        else {dtype: [] for dtype in text_dtypes}
    )


def _operand_text(names_by_dtype: Got) -> str:
    return ", ".join(
        f"{_word(dtype)} ({few})" if (few := _short_list(names)) else _word(dtype)
        for dtype, names in names_by_dtype.items()
    )


def _short_list(names: list[str]) -> str:
    unique = list(dict.fromkeys(filter(None, names)))
    return ", ".join(unique if len(unique) <= 4 else [*unique[:3], "..."])  # noqa: PLR2004


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fix_for(
    call: _Call, names_by_dtype: Got, text_dtypes: tuple[torch.dtype, ...], text: str
) -> tuple[str, str]:
    """Return the rule that mends it, "" if none does, and what to do as a sentence."""
    name = call.operation
    unsupported = next(
        (dtype for dtype in names_by_dtype if dtype not in _CASTABLE), None
    )
    if call.writes:
        wanted = (
            f"give all operands {_word(next(iter(names_by_dtype)))}"
            if names_by_dtype
            else "cast"
        )
        return "", f"No rule reaches in-place and out= forms: {wanted} by hand."
    if unsupported is not None:
        it = _short_list(names_by_dtype[unsupported]) or "it"
        change = "the others to it" if unsupported.is_complex else f"{it} to float32"
        return "", f"No rule touches {_word(unsupported)}: cast {change} by hand."
    promote_failed = _PROMOTE_ERROR in text
    if not name or (len(names_by_dtype) <= 1 and not promote_failed):
        return "", "Cast them to one dtype by hand."
    rows = [
        {row.category for op, row in table.items() if op.partition(".")[0] == name}
        for table in (*TABLES.values(), *LEAN.values())
    ]
    # No cast by any table leaves fp32 in a mix, or just what the operands were.
    as_called = torch.float32 in text_dtypes or (
        all(names_by_dtype.values()) and names_by_dtype.keys() >= {*text_dtypes}
    )
    casts = all(words & {LOW, FP32, PROMOTE} for words in rows)
    if casts and as_called and not promote_failed:
        return "", f"Autocast was off, or a rule keeps {name} as called: cast by hand."
    category = LOW if any(LOW in words for words in rows) else PROMOTE
    rule = f"op:{name}={category}"
    return rule, f"Mend it with the policy rule '{rule}', or cast by hand."

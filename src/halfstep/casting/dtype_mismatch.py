"""Explains torch's errors about mixed dtypes and names a policy rule that fixes them.

In: an exception raised inside an autocast context. Out: a `DtypeMismatch` with
operation, module and dtypes; None if the error has another cause.

It reads torch's message and the frames of the traceback. It never runs user code (no
property, no `__getattr__`) and keeps no reference to frames or tensors.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.casting.failed_call import (
    FailedCall,
    custom_function,
    failed_call,
    frames_of,
    innermost_module,
)
from halfstep.numerics.formats import AUTOCAST_DTYPES
from halfstep.policy.op_tables import FP32, LEAN, LOW, PROMOTE, TABLES
from halfstep.policy.rules import Rule, matching_ops

if TYPE_CHECKING:
    Got = dict[torch.dtype, list[str]]  # dtype -> names of operands


class DtypeMismatch(RuntimeError):  # noqa: N818 -- a public name of the API
    """Operands of different dtypes under autocast: where, and which rule fixes it.

    Args:
        message: torch's text, then one line with operation, module and fix.
        operation: Name of the operation in `torch.ops.aten`, "" if unknown.
        module: Path of the module in the model; "" is the model itself, or unknown.
        dtypes: The different dtypes, in the order of the operands, as far as known.
        rule: The policy rule that fixes it ("op:addmv=low"), "" if none does.

    Example:
        >>> from halfstep import autocast
        >>> weight, vector = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2)
        >>> try:
        ...     with autocast("cpu", torch.bfloat16):
        ...         torch.mv(weight, vector)
        ... except DtypeMismatch as error:
        ...     print(error.dtypes)
        (torch.bfloat16, torch.float32)
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


def explain(error: BaseException, *, enabled: bool = True) -> DtypeMismatch | None:
    """Return the exception to raise from an error about mixed dtypes, else None.

    Why: torch says "expected m1 and m2 to have the same dtype", but neither which of a
    hundred layers that was nor how to have the operands cast.

    Args:
        error: Any exception, with its traceback. A `DtypeMismatch` gives None.
        enabled: Whether its context casts; if not, no rule is advised.
    """
    text = _text_of(error)
    text_dtypes = _mismatched_dtypes(text)
    if text_dtypes is None:
        return _unsupported(error, text, enabled=enabled)
    frames, in_backward = frames_of(error)
    call = failed_call(frames)
    path, module = innermost_module(frames)
    names_by_dtype = _names_by_dtype(call, text_dtypes)
    function, method = custom_function(frames)
    if function:
        rule, advice = "", _advice_for_function(function, method, call)
    elif in_backward and module is None:
        rule, advice = "", "No rule reaches a backward pass: cast by hand."
    elif not enabled:
        rule, advice = "", "Autocast is off here, so no rule applies: cast by hand."
    else:
        rule, advice = _fix_for(call, module, names_by_dtype, text_dtypes, text)
    where = f" in {function}.{method}" if function else _where(path, module)
    message = (
        f"{text.rstrip()}\n-> {call.operation or 'an operation'}{where} got "
        f"{_operand_text(names_by_dtype) or 'operands of different dtypes'}. {advice}"
    )
    return DtypeMismatch(message, call.operation, path, tuple(names_by_dtype), rule)


def _where(path: str, module: nn.Module | None) -> str:
    """Return the module as text, "" if unknown."""
    name = f"module '{path}'" if path else "the model"
    return "" if module is None else f" in {name} ({type(module).__name__})"


def _advice_for_function(function: str, method: str, call: FailedCall) -> str:
    """Return how to decorate a custom function so that its operands have one dtype."""
    devices = [tensor.device.type for _, tensor in call.operands]
    device = f"device_type={next(iter(devices), 'cpu')!r}"
    forward = f"halfstep.custom_fwd({device}, cast_inputs=torch.float32)"
    if method == "forward":
        return f"Decorate {function}.forward with {forward}."
    return (
        f"Decorate {function}.forward with {forward}, and {function}.backward with "
        f"halfstep.custom_bwd({device})."
    )


def _unsupported(
    error: BaseException, text: str, *, enabled: bool
) -> DtypeMismatch | None:
    """Return the exception to raise if one 16-bit dtype is not supported, else None."""
    line = next((one for one in text.splitlines() if _UNSUPPORTED.search(one)), "")
    low = [dtype for dtype in _dtypes_in(line) if dtype.itemsize == 2]  # noqa: PLR2004
    if not low:
        return None
    dtype, frames = _word(low[-1]), frames_of(error)[0]
    call, (path, module) = failed_call(frames), innermost_module(frames)
    name = call.operation or "an operation"
    has_rule = enabled and call.operation
    rule = f"op:{call.operation.removesuffix('_')}=fp32" if has_rule else ""
    by_rule = f"keep it in float32 with the policy rule '{rule}', or " if rule else ""
    by_rule += "call .float()"
    if "without overflow" in line:
        bounds = torch.finfo(low[-1])
        beyond = [n for n in call.numbers if not bounds.min <= n <= bounds.max]
        number = f"{beyond[0]:g}" if beyond else "a number"
        extreme = "max" if beyond and beyond[0] > 0 else "min"
        what = f"got {number}, which {dtype} does not hold"
        advice = f"Write torch.finfo(x.dtype).{extreme}, or {by_rule}."
    elif any(tensor.layout != torch.strided for _, tensor in call.operands):
        what = f"has no {dtype} kernel for sparse tensors"
        advice = "Run it under autocast(enabled=False), on .float()."
        rule = ""
    else:
        what = f"has no {dtype} kernel"
        advice = f"{by_rule[0].upper()}{by_rule[1:]}."
    message = f"{text.rstrip()}\n-> {name}{_where(path, module)} {what}. {advice}"
    return DtypeMismatch(message, call.operation, path, (low[-1],), rule)


def add_cure(error: BaseException) -> None:
    """Add a note to an error that 16 bits, but not mixed dtypes, have caused."""
    text = str(error)
    for words, cure in _CURES.items():
        if words in text and cure not in getattr(error, "__notes__", ()):
            error.add_note(cure)


_CURES = {
    "Got unsupported ScalarType BFloat16": "-> numpy has no bfloat16: call "
    ".float().numpy().",
    "Cannot insert a Tensor that requires grad as a constant": "-> autocast caches "
    "casts of weights, which are not constants: trace inside "
    "autocast(..., cache_enabled=False).",
}


def is_about_dtypes(error: BaseException) -> bool:
    """Return whether an error of torch's, not a `DtypeMismatch`, is about mixed dtypes.

    torch's recurrent layers raise a ValueError.
    """
    if type(error) is ValueError:
        error = RuntimeError(*error.args)
    return _mismatched_dtypes(_text_of(error)) is not None


# torch's messages


def _text_of(error: BaseException) -> str:
    """Return torch's message; "" for classes of others, which are never replaced."""
    package = type(error).__module__.partition(".")[0]
    if not isinstance(error, RuntimeError) or package not in {"builtins", "torch"}:
        return ""
    return next((arg for arg in error.args if isinstance(arg, str)), "")


_UNSUPPORTED = re.compile(
    r"not implemented for '(BFloat16|Half)'|Low precision dtypes not supported"
    r"|to be Half, Float or Double tensors but got|without overflow"
)
"""Matches messages about a dtype that has no kernel or cannot represent a number."""


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
"""Matches messages about mixed dtypes; they must name two, except the group `bare`.
Messages that expect an integer type are excluded: there an index or target is wrong."""

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
"""Dtype -> its names in messages: scalar type, Python's and C++'s."""

_DTYPE_OF = {name: dtype for dtype, names in _NAMES.items() for name in names.split()}

# "CPUBFloat16Type", "torch.cuda.HalfTensor", and one without a space: "gotHalf".
_WORD = re.compile(
    r"((?:Complex)?(?:BFloat16|Half|Float|Double)|Long|Int)(?=Type\b|Tensor\b|\b)"
    r"|\b(complex<[\w:]+>|[a-z]+\d*\b)"
)

_ON = re.compile(r"torch\.(?:(\w+)\.)?\w+Tensor|\b(CPU|CUDA|MPS|XPU)\w+Type")


def _mismatched_dtypes(text: str) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes in a message about mixed dtypes; None: not such a message."""
    match = next(filter(None, map(_MISMATCH.search, text.splitlines())), None)
    if match is None:
        return None
    line = match.string
    if len({(on[1] or on[2] or "CPU").upper() for on in _ON.finditer(line)}) > 1:
        return None  # on two devices: a cast does not fix that
    # Only those after "got": "expected" may list all dtypes that are allowed.
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


# The fix

_DTYPE = inspect.getattr_static(Tensor, "dtype")


def _names_by_dtype(call: FailedCall, text_dtypes: tuple[torch.dtype, ...]) -> Got:
    """Return dtype -> names of operands, from the frame, or else from the message."""
    names_by_dtype: Got = {}
    # Otherwise subclasses of Tensor and modes could intercept the attribute.
    with torch._C.DisableTorchFunction():  # noqa: SLF001 -- documented, and not public
        for name, tensor in call.operands:
            dtype = _DTYPE.__get__(tensor)
            if dtype.is_floating_point or dtype.is_complex or dtype in text_dtypes:
                names_by_dtype.setdefault(dtype, []).append(name)
    is_complete = len(names_by_dtype) > 1 and all(
        dtype in names_by_dtype or dtype in AUTOCAST_DTYPES for dtype in text_dtypes
    )
    if is_complete or not text_dtypes:
        return names_by_dtype
    return {dtype: names_by_dtype.get(dtype, []) for dtype in text_dtypes}


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
    call: FailedCall,
    module: nn.Module | None,
    names_by_dtype: Got,
    text_dtypes: tuple[torch.dtype, ...],
    text: str,
) -> tuple[str, str]:
    """Return (the rule that fixes it or "", the advice as a sentence)."""
    name = call.operation
    unsupported = next(
        (dtype for dtype in names_by_dtype if dtype not in AUTOCAST_DTYPES), None
    )
    if call.writes:
        first = next(map(_word, names_by_dtype), "")
        wanted = f"give all operands {first}" if first else "cast"
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
    # If the tables cast it, fp32 or unchanged dtypes in the mix mean it was not cast.
    as_called = torch.float32 in text_dtypes or (
        all(names_by_dtype.values()) and names_by_dtype.keys() >= {*text_dtypes}
    )
    casts = all(words & {LOW, FP32, PROMOTE} for words in rows)
    if casts and as_called and not promote_failed:
        return "", f"Autocast was off, or a rule keeps {name} as called: cast by hand."
    category = LOW if any(LOW in words for words in rows) else PROMOTE
    rule = f"op:{name}={category}"
    if not matching_ops(Rule("op", name, category)):  # it writes to some argument
        is_layer = type(module).__module__.startswith("torch.")
        rule = f"type:{type(module).__name__}=fp32" if is_layer else ""
    if not rule:
        return "", f"No rule reaches {name}: cast by hand."
    return rule, f"Fix it with the policy rule '{rule}', or cast by hand."

"""Names operations as users call them, and finds the casts in a program's code.

The same aten `mm` runs for `x @ w`, `linear` and `einsum`, and policy rules match the
function called, so calls are tracked. A cast by autocast happens inside the call of
another function; a cast by the program is a call itself.
"""

from __future__ import annotations

import inspect
import linecache
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from halfstep.policy.rules import Rule, matching_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

_USER_NAMES = {
    "addmm": "linear",
    "bmm": "matmul",
    "to_copy": "to",
    "nll_loss2d": "nll_loss",
    "linalg_vector_norm": "norm",
    "mkldnn_rnn_layer": "lstm",
    "thnn_fused_lstm_cell": "lstm",
    "thnn_fused_gru_cell": "gru",
    "cudnn_rnn": "rnn",
}
_AFFIXES = re.compile(r"^_*(native_|cudnn_|miopen_|mkldnn_|safe_|fused_)?|_forward$|_$")
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
_TRANSPOSED = 6
"""Index of the argument `transposed` of aten's convolution."""
_FUNCTION_NAMES = {"rmatmul": "matmul", "imatmul": "matmul", "setitem": "copy"}
_CASTS = {"to", "half", "bfloat16", "type", "type_as", "copy", "cast"}


def aten_name(func: torch._ops.OpOverload) -> str:
    """Return the aten name of an operation, without overload and trailing "_"."""
    name: str = func._schema.name.partition("::")[2]  # noqa: SLF001
    return name.rstrip("_") if not name.startswith("__") else name


def is_matmul(name: str) -> bool:
    """Return whether an aten operation is a matmul or a convolution."""
    return name in _MATMULS or name.endswith("convolution")


def user_name(name: str, rank: int, args: Sequence[object], *, weighted: bool) -> str:
    """Return the user's name of aten operation `name`; its result has `rank` dims."""
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    if name.endswith("convolution"):
        transpose = name == "convolution" and args[_TRANSPOSED]
        return f"conv{'_transpose' if transpose else ''}{max(1, rank - 2)}d"
    if name == "mm":
        return "linear" if weighted else "matmul"
    short = _AFFIXES.sub("", name)
    return _USER_NAMES.get(name.lstrip("_")) or _USER_NAMES.get(short) or short


def op_rule(name: str) -> str:
    """Return a rule that keeps an operation in fp32; "" if no rule can match it."""
    rule = Rule("op", name, "fp32")
    return str(rule) if matching_ops(rule) else ""


class Cast(NamedTuple):
    """A cast in the program's code."""

    where: str
    """File and line, such as "net.py:31"."""
    fixed: bool
    """Whether its dtype is a constant, which no rule or level changes."""


class TorchCalls(TorchFunctionMode):
    """Tracks which function of torch the program is calling, inside its `with` block.

    `on_cast` is called with the result of each cast by the program, which is the
    argument itself if that already had the dtype.
    """

    def __init__(self, on_cast: Callable[[object, Cast], None]) -> None:
        super().__init__()
        self._on_cast = on_cast
        self._function = ""
        """Name of the current function; "" outside of a call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function and track its name."""
        del types
        before = self._function
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        self._function = _FUNCTION_NAMES.get(name, name)
        try:
            result = func(*args, **(kwargs or {}))
            cast = self.cast()
            if cast is not None:
                self._on_cast(args[0] if result is None else result, cast)
        finally:
            self._function = before
        return result

    @property
    def op(self) -> str:
        """The current function if it is an aten operation and no cast, else ""."""
        name = self._function
        is_op = name and name not in _CASTS and hasattr(torch.ops.aten, name)
        return name if is_op else ""

    def cast(self) -> Cast | None:
        """Return the current call if it is a cast by the program, else None."""
        if self._function not in _CASTS:
            return None
        frame: FrameType | None = inspect.currentframe()
        call = TorchCalls.__torch_function__.__code__
        while frame is not None and frame.f_code is not call:
            frame = frame.f_back
        frame = None if frame is None else frame.f_back
        if frame is None or frame.f_globals.get("__name__", "").startswith("halfstep."):
            return None
        path, number = frame.f_code.co_filename, frame.f_lineno
        line = linecache.getline(path, number)
        # The source line shows if the dtype is a literal or another tensor's.
        follows = self._function == "copy" or "dtype" in line or "type_as" in line
        fixed = not follows or "half" in line or "float16" in line
        return Cast(f"{Path(path).name}:{number}", fixed)

"""Which function of torch's a program calls, and where in its code.

In: calls as they are made. Out: the name of the one under way, such as "matmul" for
`x @ w`, and the line that made it.

Why: what runs below it is the same `mm` for `x @ w`, `linear` and `einsum`, and a rule
of a policy speaks of what was called. A cast that autocast makes runs within a call of
something else; one that the program makes is a call of its own.
"""

from __future__ import annotations

import inspect
import linecache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


_WORDS = {"rmatmul": "matmul", "imatmul": "matmul", "setitem": "copy"}
_CASTS = {"to", "half", "bfloat16", "type", "type_as", "copy", "cast"}
_FIXED = ("half", "float16")
_FOLLOWS = ("dtype", "type_as")
"""In a line of code: the format of the cast stands there; it follows another one."""


class Cast(NamedTuple):
    """A cast that the program makes by itself."""

    where: str
    """Such as "net.py:31"."""
    fixed: bool
    """Its format follows nothing else, so no rule and no other level changes it."""


class Calls(TorchFunctionMode):
    """Knows the function of torch's that is under way, while it is entered.

    Args:
        cast: Called with the result of each cast that the program makes, though it may
            be what was cast, where that had the format already.
    """

    def __init__(self, cast: Callable[[object, Cast], None]) -> None:
        super().__init__()
        self._on_cast = cast
        self.word = ""
        """Its name; "" where none is."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call it, and take down what it is meanwhile."""
        del types
        before = self.word
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        self.word = _WORDS.get(name, name)
        try:
            result = func(*args, **(kwargs or {}))
            cast = self.cast()
            if cast is not None:
                self._on_cast(args[0] if result is None else result, cast)
        finally:
            self.word = before
        return result

    @property
    def op(self) -> str:
        """The call as an operation of aten's; "" where it is none, or a cast."""
        is_aten_op = self.word not in _CASTS and hasattr(torch.ops.aten, self.word)
        return self.word if self.word and is_aten_op else ""

    def cast(self) -> Cast | None:
        """Return the cast under way; None where the program has called for none."""
        if self.word not in _CASTS:
            return None
        frame = _caller()
        if frame is None or frame.f_globals.get("__name__", "").startswith("halfstep."):
            return None
        name, number = frame.f_code.co_filename, frame.f_lineno
        line = linecache.getline(name, number)
        follows = any(word in line for word in _FOLLOWS) or self.word == "copy"
        fixed = not follows or any(word in line for word in _FIXED)
        return Cast(f"{Path(name).name}:{number}", fixed)


def _caller() -> FrameType | None:
    """Return where the function under way was called."""
    frame = inspect.currentframe()
    own = Calls.__torch_function__.__code__
    while frame is not None and frame.f_code is not own:
        frame = frame.f_back
    return None if frame is None else frame.f_back

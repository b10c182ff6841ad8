"""Which hooks on saved tensors are in force, as activation checkpointing sets them.

In: nothing. Out: a number, another one for other hooks, 0 for none.

torch 2.6 keeps its stack of hooks to itself. There, this room counts along: it wraps
how `torch.autograd.graph.saved_tensors_hooks` opens and closes, in each thread.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "_top_saved_tensors_default_hooks"
_top: Callable[[bool], tuple[Any, Any] | None] | None
_top = getattr(torch._C._autograd, _NAME, None)  # noqa: SLF001


class _Thread(threading.local):
    """The hooks that a thread is under, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[int] = []


_thread = _Thread()


def _count_along() -> None:
    """Wrap how hooks open and close, for a torch that does not tell which are."""
    opens, closes = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    @functools.wraps(opens)
    def enter(self: saved_tensors_hooks) -> None:
        opens(self)
        _thread.stack.append(id(self.pack_hook))

    @functools.wraps(closes)
    def leave(self: saved_tensors_hooks, *args: object) -> None:
        closes(self, *args)
        # Those that were open before this room was there were not counted.
        if _thread.stack:
            _thread.stack.pop()

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = leave  # type: ignore[method-assign]


def hooks() -> int:
    """Return which hooks this thread is under, 0 for none."""
    if _top is None:
        return _thread.stack[-1] if _thread.stack else 0
    top = _top(True)  # noqa: FBT003 -- torch's own
    return 0 if top is None else id(top[0])


if _top is None:
    _count_along()

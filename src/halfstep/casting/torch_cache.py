"""torch's own cache of casts, kept from serving what is no longer true.

In: contexts that open and close. Out: that cache forgets all when a weight may have
changed inside a context, or when a context asks for another dtype.

Why: its key is the weight alone. It serves the value that a weight had before it was
changed, and the dtype of the context around. To ask at each operation would cost more
than the operation; but a weight that learns is as a rule written into only where grad
mode is off, or by an optimizer: when either ends, the cache starts anew. Between two
operations under one `no_grad`, and for an edit of `weight.data` or `weight.detach()`,
there is no such moment; a `CastCache` sees all but the edit of `weight.data`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import grad_mode

from halfstep._torch import optimizer_hooks
from halfstep._torch.patches import attribute_patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_entered: set[EnteredContext] = set()
"""The contexts open in all threads: torch's cache is shared."""


class _Thread(threading.local):
    """The dtypes of the contexts that a thread is in, by device, outermost first."""

    def __init__(self) -> None:
        self.dtypes: defaultdict[str, list[torch.dtype]] = defaultdict(list)


_thread = _Thread()


@dataclass(frozen=True, eq=False, slots=True)
class EnteredContext:
    """A context that casts; `closed` needs it."""

    device: str
    dtype: torch.dtype
    dtypes: list[torch.dtype]
    """Of the thread that opened it: another one may close it."""


_NO_WRITERS = frozenset(("torch.autograd.grad_mode", "torch.utils.checkpoint"))
"""Modules that change the grad mode and write no weights. The first does so to begin a
mode and to end one, which is seen itself; the second whenever a tensor is saved, in the
middle of an operation that may use a cast many times."""


def _clearing(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def run_and_forget(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        run(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") not in _NO_WRITERS:  # noqa: SLF001
            _clear()

    return run_and_forget


def _clear(*_: object) -> None:
    # Whatever thread writes, it may write into what a context in another has cast.
    if _entered and not _handles_an_operation():
        torch.clear_autocast_cache()


def _handles_an_operation() -> bool:
    """Say whether this thread runs a `__torch_dispatch__`, below autocast.

    There torch may be in the middle of a cast, and hold the lock of its cache, which
    this thread would wait for forever. Who handles an operation changes no weight.
    """
    if all(torch.is_autocast_enabled(entered.device) for entered in list(_entered)):
        return False  # while torch casts, autocast is off: no need to walk the stack
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None


optimizer_hooks.register_post_step_callback(_clear)
PATCHES = (
    optimizer_hooks.STEP_PATCH.apply,
    attribute_patch(grad_mode.no_grad, "__exit__", _clearing),
    attribute_patch(grad_mode.set_grad_enabled, "__exit__", _clearing),
    attribute_patch(grad_mode.inference_mode, "__exit__", _clearing),
    # As a function it needs no end: `torch.set_grad_enabled(True)`.
    attribute_patch(grad_mode.set_grad_enabled, "__init__", _clearing),
)
"""They start the cache anew, inside contexts, whenever a weight may have changed."""


def in_context() -> bool:
    """Say whether this thread is in a context of ours that casts."""
    return any(_thread.dtypes.values())


def on_enter(device: str, dtype: torch.dtype) -> EnteredContext:
    """Take note of a context that casts; call it when the context is open."""
    dtypes = _thread.dtypes[device]
    entered = EnteredContext(device, dtype, dtypes)
    if dtypes[-1:] != [dtype]:
        torch.clear_autocast_cache()
    if any(
        other.device == device and other.dtype != dtype and other.dtypes is not dtypes
        for other in list(_entered)
    ):
        # Another thread's context has another dtype, and the cache is one for both.
        torch.set_autocast_cache_enabled(False)
    dtypes.append(dtype)
    _entered.add(entered)
    return entered


def on_exit(entered: EnteredContext) -> None:
    """Take note that a context that casts is about to close."""
    dtypes = entered.dtypes
    # The last of them: an outer context with the same dtype is still open.
    del dtypes[len(dtypes) - 1 - dtypes[::-1].index(entered.dtype)]
    _entered.discard(entered)
    if dtypes[-1:] != [entered.dtype]:
        torch.clear_autocast_cache()

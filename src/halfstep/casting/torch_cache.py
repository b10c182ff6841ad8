"""Clears torch's autocast cache when a weight or the dtype may have changed.

Why: torch's cache is keyed by the weight alone, so that it returns the value from
before a change, and the dtype of the enclosing context. A check at each operation would
cost more than the operation. Trainable weights are normally written to only by an
optimizer or with grad mode off, so the cache is cleared after either. Writes between
two operations under one `no_grad`, or through `weight.data` or `weight.detach()`, are
not detected; a `CastCache` detects all but writes through `weight.data`.
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
from halfstep._torch.patches import AttributePatch

if TYPE_CHECKING:
    from collections.abc import Callable

_entered: set[EnteredContext] = set()
"""The contexts open in all threads, since torch's cache is shared by them."""


class _Thread(threading.local):
    """Device -> dtypes of the contexts that a thread is in, outermost first."""

    def __init__(self) -> None:
        self.dtypes: defaultdict[str, list[torch.dtype]] = defaultdict(list)


_thread = _Thread()


@dataclass(frozen=True, eq=False, slots=True)
class EnteredContext:
    """Return value of `on_enter`, argument of `on_exit`."""

    device: str
    dtype: torch.dtype
    dtypes: list[torch.dtype]
    """The list of the thread that entered; another thread may exit."""


_NO_WRITERS = frozenset(("torch.autograd.grad_mode", "torch.utils.checkpoint"))
"""Modules that set the grad mode but write no weights. The exits of the first are
patched themselves; the second sets it whenever a tensor is saved, in the middle of an
operation that may use a cast many times."""


def _clearing(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def run_and_forget(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        run(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") not in _NO_WRITERS:  # noqa: SLF001
            _clear()

    return run_and_forget


_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView  # noqa: SLF001
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # noqa: SLF001
"""Of autograd's last key: true where Python handles an operation, and nowhere else.

While torch casts a weight it holds the lock of its cache. A `__torch_dispatch__` or a
kernel of torch.library that handles that cast would wait for this lock forever. There
the cache is not cleared, but not used any more until the context ends.
"""


def _clear(*_: object) -> None:
    # Whatever thread writes, it may write into what a context in another has cast.
    if not _entered:
        return
    if not _is_excluded(_BELOW_AUTOGRAD):
        torch.clear_autocast_cache()
    elif in_context():
        torch.set_autocast_cache_enabled(False)


optimizer_hooks.register_post_step_callback(_clear)
PATCHES = (
    optimizer_hooks.STEP_PATCH.apply,
    AttributePatch(grad_mode.no_grad, "__exit__", _clearing),
    AttributePatch(grad_mode.set_grad_enabled, "__exit__", _clearing),
    AttributePatch(grad_mode.inference_mode, "__exit__", _clearing),
    # As a function call, it has no exit: `torch.set_grad_enabled(True)`.
    AttributePatch(grad_mode.set_grad_enabled, "__init__", _clearing),
)
"""They clear the cache, inside contexts, whenever a weight may have changed."""


def in_context() -> bool:
    """Return whether this thread is in an enabled halfstep context."""
    return any(_thread.dtypes.values())


def on_enter(device: str, dtype: torch.dtype) -> EnteredContext:
    """Record an enabled context; call it after torch's `__enter__`."""
    dtypes = _thread.dtypes[device]
    entered = EnteredContext(device, dtype, dtypes)
    if dtypes[-1:] != [dtype]:
        if _is_excluded(_BELOW_AUTOGRAD):
            torch.set_autocast_cache_enabled(False)
        else:
            torch.clear_autocast_cache()
    if _entered and any(
        other.device == device and other.dtype != dtype and other.dtypes is not dtypes
        for other in list(_entered)
    ):
        # Another thread's context has another dtype, and both share the cache.
        torch.set_autocast_cache_enabled(False)
    dtypes.append(dtype)
    _entered.add(entered)
    return entered


def on_exit(entered: EnteredContext) -> None:
    """Remove an enabled context; call it before torch's `__exit__`."""
    dtypes = entered.dtypes
    # The last occurrence: an outer context with the same dtype is still open.
    del dtypes[len(dtypes) - 1 - dtypes[::-1].index(entered.dtype)]
    _entered.discard(entered)
    if dtypes[-1:] != [entered.dtype] and not _is_excluded(_BELOW_AUTOGRAD):
        torch.clear_autocast_cache()

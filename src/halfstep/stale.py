"""torch's own cache of casts, kept from serving what is no longer true.

In: regions that open and close. Out: that cache forgets all when a weight may have
changed inside a region, or when a region asks for another dtype.

Why: its key is the weight alone. It serves the value that a weight had before it was
changed, and the dtype of the region around. To ask at each operation would cost more
than the operation; but a weight that learns is as a rule written into only where grad
mode is off, or by an optimizer: when either ends, the cache starts anew. Between two
operations under one `no_grad`, and for an edit of `weight.data` or `weight.detach()`,
there is no such moment; a `CastCache` sees all but the edit of `weight.data`.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import grad_mode

from halfstep import hooks

if TYPE_CHECKING:
    from collections.abc import Callable

_lock = threading.Lock()
_open: dict[tuple[str, torch.dtype], int] = {}
"""Device type and dtype -> regions open in all threads: torch's cache is shared."""


class _Thread(threading.local):
    """The dtypes of the regions that a thread is in, by device, outermost first."""

    def __init__(self) -> None:
        self.dtypes: defaultdict[str, list[torch.dtype]] = defaultdict(list)


_thread = _Thread()


@functools.cache
def watch() -> None:
    """Start the cache anew, inside regions, whenever a weight may have changed."""
    hooks.after_each_step(_forget)
    modes = (grad_mode.no_grad, grad_mode.set_grad_enabled, grad_mode.inference_mode)
    for mode in modes:
        mode.__exit__ = _then_forget(mode.__exit__)  # type: ignore[method-assign]
    # As a function it needs no end: `torch.set_grad_enabled(True)`.
    start = _then_forget(grad_mode.set_grad_enabled.__init__)
    grad_mode.set_grad_enabled.__init__ = start  # type: ignore[method-assign]


def _then_forget(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def run_and_forget(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        run(*args, **kwargs)
        _forget()

    return run_and_forget


def _forget(*_: object) -> None:
    # Whatever thread writes, it may write into what a region in another has cast.
    if _open:
        torch.clear_autocast_cache()


def inside() -> bool:
    """Say whether this thread is in a region of ours that casts."""
    return any(_thread.dtypes.values())


def opened(device: str, dtype: torch.dtype) -> None:
    """Take note of a region that casts; call it when the region is open."""
    own = _thread.dtypes[device]
    with _lock:
        _open[device, dtype] = _open.get((device, dtype), 0) + 1
        disputed = any(
            place == device and other != dtype and count > own.count(other)
            for (place, other), count in _open.items()
        )
    if own[-1:] != [dtype]:
        torch.clear_autocast_cache()
    if disputed:
        # Another thread's region has another dtype, and the cache is one for both.
        torch.set_autocast_cache_enabled(False)
    own.append(dtype)


def closed(device: str) -> None:
    """Take note that this thread's innermost region that casts is about to close."""
    own = _thread.dtypes[device]
    dtype = own.pop()
    with _lock:
        _open[device, dtype] -= 1
        if not _open[device, dtype]:
            del _open[device, dtype]
    if own[-1:] != [dtype]:
        torch.clear_autocast_cache()

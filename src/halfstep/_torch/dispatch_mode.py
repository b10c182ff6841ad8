"""A dispatch mode that several threads may enter at the same time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from typing import Self

_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
"""torch's "in a mode" flags: global to the process, though a mode is per thread."""

_LOCK = threading.Lock()


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """TorchDispatchMode that leaves torch's flags correct when threads overlap.

    Why: torch restores its flags to their values at entry. If two threads overlap, the
    last to exit restores flags that the other had set, and they stay set: torch 2.9
    then compiles nothing, in any thread.
    """

    _entered = 0
    """Number of modes entered, in all threads."""

    def __enter__(self) -> Self:
        with _LOCK:
            if not torch._C._len_torch_dispatch_stack():  # noqa: SLF001
                # Flags set now belong to another thread, and must not be restored.
                vars(_python_dispatch).update(dict.fromkeys(_FLAGS, False))
            super().__enter__()  # type: ignore[no-untyped-call]
            DispatchMode._entered += 1
        return self

    def __exit__(self, *args: object) -> None:
        with _LOCK:
            inside = {name: vars(_python_dispatch)[name] for name in _FLAGS}
            super().__exit__(*args)  # type: ignore[no-untyped-call]
            DispatchMode._entered -= 1
            if DispatchMode._entered:  # another thread may still be in a mode
                vars(_python_dispatch).update(inside)

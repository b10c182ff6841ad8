"""A dispatch mode of torch that may be entered in several threads at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from typing import Self

_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
"""torch's variables for "in a mode": of the process, though a mode is of a thread."""

_LOCK = threading.Lock()


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch, after which torch's flags say what is true.

    Why: torch's own restores the flags to what they were when it was entered. Where two
    threads overlap, the last to exit restores what the other had set, and nobody clears
    that: torch 2.9 then compiles nothing, in any thread.
    """

    _entered = 0
    """In all threads."""

    def __enter__(self) -> Self:
        with _LOCK:
            if not torch._C._len_torch_dispatch_stack():  # noqa: SLF001
                # What is set now is of another thread, and not to be restored.
                vars(_python_dispatch).update(dict.fromkeys(_FLAGS, False))
            super().__enter__()  # type: ignore[no-untyped-call]
            DispatchMode._entered += 1
        return self

    def __exit__(self, *args: object) -> None:
        with _LOCK:
            inside = {name: vars(_python_dispatch)[name] for name in _FLAGS}
            super().__exit__(*args)  # type: ignore[no-untyped-call]
            DispatchMode._entered -= 1
            if DispatchMode._entered:  # perhaps in another thread, where it still holds
                vars(_python_dispatch).update(inside)

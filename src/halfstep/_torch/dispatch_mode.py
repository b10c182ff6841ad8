"""The dispatch mode by which operations are recorded and traced."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from typing import Self

_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
"""torch's "in a mode" flags: global to the process, though a mode is per thread."""

_LOCK = threading.Lock()


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operation below autograd to `run`, in this thread.

    It leaves torch's flags correct when threads overlap. Why: torch restores its flags
    to their values at entry. If two threads overlap, the last to exit restores flags
    that the other had set, and they stay set: torch 2.9 then compiles nothing, in any
    thread.
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

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation."""
        del types
        return self.run(func, args, kwargs or {})

    def run(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an operation; override it to observe or to change what runs."""
        return func(*args, **kwargs)


def returns_view(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation returns views of its arguments, or these."""
    return any(out.alias_info for out in func._schema.returns)  # noqa: SLF001

"""What halfstep changes in torch while one of its contexts is open, and the undoing.

These are all that are shared:

- `casting.torch_cache`: leaving a grad mode empties torch's cache of casts, inside
  contexts;
- `casting.data_parallel`: `nn.DataParallel` runs its replicas under the caller's
  context;
- `casting.recompute`: activation checkpointing runs its segments again under the policy
  of the forward pass, and higher-order operators do not see the dispatch key of
  `casting.dispatch_kernels`;
- `diagnostics.step_numerics`: `hs.diagnose` sees the loss that goes into
  `torch.autograd.backward`, while it runs;
- `optimizer_hooks`: optimizer steps make caches of casts forget, inside contexts and
  while a `CastCache` lives.

Not shared, and elsewhere: `graph.capture` refuses custom autograd functions, hooks on
tensors, inference mode and checkpointing while a model is captured; a process that was
started with HALFSTEP set has the patches of `launch.script_training` for as long as it
lives; `compat.apex.amp_handle` patches what apex patches, until its handle is closed;
`halfstep train` registers a CPU kernel for dropout (`train.fast_dropout`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Undo = Callable[[], object]
    Apply = Callable[[], Undo]


class SharedPatches:
    """Changes of torch that hold while they have a user.

    Args:
        apply: Each makes a change and returns the function that takes it back.
    """

    def __init__(self, *apply: Apply) -> None:
        self._changes = apply
        self._undo: list[Undo] = []
        self._users = 0
        self._busy = False
        # A garbage collection inside `_update` may close a context in this thread.
        self._lock = threading.RLock()

    def acquire(self) -> None:
        """Add a user."""
        with self._lock:
            self._users += 1
            self._update()

    def release(self) -> None:
        """Take a user away."""
        with self._lock:
            self._users -= 1
            self._update()

    def apply(self) -> Undo:
        """Be one of the changes of another `SharedPatches`."""
        self.acquire()
        return self.release

    def _update(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            while bool(self._undo) != (self._users > 0):
                if self._undo:
                    while self._undo:
                        self._undo.pop()()
                else:
                    self._undo.extend(apply() for apply in self._changes)
        finally:
            self._busy = False


def attribute_patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Apply:  # noqa: ANN401
    """Return a change for `SharedPatches`: another value of an attribute.

    Args:
        owner: A class or a module of torch's.
        name: The attribute; `owner` itself has it.
        wrap: Takes the attribute as it stands in the owner (a `staticmethod` too), and
            returns what replaces it. It must work like the original without a context,
            since who wraps it in turn may keep it for good.
    """
    last_wrapped: tuple[Any, Any] = None, None
    """The attribute that was wrapped last, and what it was wrapped in: contexts open
    and close in every step."""

    def apply() -> Undo:
        nonlocal last_wrapped
        original = vars(owner)[name]
        if last_wrapped[0] is not original:
            last_wrapped = original, wrap(original)
        replacement = last_wrapped[1]
        setattr(owner, name, replacement)

        def undo() -> None:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)

        return undo

    return apply

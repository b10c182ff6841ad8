"""Patches of torch that are applied while a context of halfstep is open.

All shared patches:

- `casting.torch_cache`: leaving a grad mode clears torch's cache of casts, inside
  contexts;
- `casting.data_parallel`: `nn.DataParallel` runs its replicas under the caller's
  context;
- `casting.recompute`: activation checkpointing recomputes segments under the policy of
  the forward pass, and higher-order operators do not see the dispatch key of
  `casting.dispatch_kernels`;
- `session.model_hooks`: while a session exists, `clip_grad_norm_` raises if it would
  miss gradients of that session, and the errors of an unused `GradScaler` name the call
  to delete;
- `diagnostics.step_numerics`: while `hs.diagnose` runs, it gets the loss passed to
  `torch.autograd.backward`;
- `optimizer_hooks`: optimizer steps invalidate caches of casts, inside contexts and
  while a `CastCache` exists.

Other patches: `graph.capture` rejects custom autograd functions, tensor hooks,
inference mode and checkpointing while a model is captured; a process started with
HALFSTEP set has the patches of `launch.script_training` until it ends;
`compat.apex.amp_handle` patches what apex patches, until its handle is closed;
`use_fast_dropout` registers a CPU kernel for attention with dropout.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Undo = Callable[[], object]
    Apply = Callable[[], Undo]


class SharedPatches:
    """Patches that are applied while they have at least one user.

    Args:
        apply: Each applies a patch and returns the function that undoes it.
    """

    def __init__(self, *apply: Apply) -> None:
        self._changes = apply
        self._undo: list[Undo] = []
        self._users = 0
        self._busy = False
        # Reentrant: garbage collection during `_update` may release a user.
        self._lock = threading.RLock()

    def acquire(self) -> None:
        """Add a user."""
        with self._lock:
            self._users += 1
            self._update()

    def release(self) -> None:
        """Remove a user."""
        with self._lock:
            self._users -= 1
            self._update()

    def apply(self) -> Undo:
        """Add a user and return its removal, as a patch of another `SharedPatches`."""
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
    """Return a patch for `SharedPatches` that replaces an attribute.

    Args:
        owner: Class or module of torch that has the attribute itself.
        name: Name of the attribute.
        wrap: Takes the attribute as stored in the owner (perhaps a `staticmethod`), and
            returns its replacement. That must behave like the original outside of
            contexts, since other code may wrap it and keep it forever.
    """
    last_wrapped: tuple[Any, Any] = None, None
    """The attribute wrapped last and its replacement, reused because contexts open and
    close in every step."""

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

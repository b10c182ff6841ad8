"""Patches of torch that are applied while a context of halfstep is open.

All shared patches:

- `casting.active_context`: leaving a grad mode clears torch's cache of casts, inside
  contexts;
- `casting.recompute`: `nn.DataParallel` runs its replicas under the caller's
  context;
- `casting.recompute`: activation checkpointing recomputes segments under the policy of
  the forward pass;
- `casting.active_context`: higher-order operators do not see its dispatch key;
- `diagnostics.step_numerics`: while `hs.diagnose` runs, it gets the loss passed to
  `torch.autograd.backward`;
- `diagnostics.step_calls`: meanwhile, the calls of every GradScaler class and of
  `torch.autocast` are recorded;
- `optimizer_hooks`: optimizer steps invalidate caches of casts, inside contexts and
  while a `CastCache` exists.

Other patches: `graph.capture` rejects custom autograd functions, tensor hooks,
inference mode and checkpointing while a model is captured; a process started with
HALFSTEP set has the patches of `launch.script_training` until it ends;
`compat.apex.amp_handle` patches what apex patches, until its handle is closed;
`use_fast_dropout` registers a CPU kernel for attention with dropout.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Undo = Callable[[], object]
    Apply = Callable[[], Undo]


_INHERITED = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:  # noqa: ANN401
    """Replace an attribute of a class, module or object; restore it on exit."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@dataclass(slots=True)
class AttributePatch:
    """Replaces an attribute of torch, as a patch for `SharedPatches`."""

    owner: Any
    """Class or module of torch that has the attribute itself."""
    name: str
    wrap: Callable[[Any], Any]
    """Takes the attribute as stored in the owner (perhaps a `staticmethod`), and
    returns its replacement. That must behave like the original outside of contexts,
    since other code may wrap it and keep it forever."""
    original: Any = None
    """The attribute wrapped last. It and its replacement are reused, because contexts
    open and close in every step."""
    replacement: Any = None


class SharedPatches:
    """Patches that are applied while they have at least one user.

    Each is an `AttributePatch`, or applies a patch and returns what undoes it.
    """

    def __init__(self, *changes: AttributePatch | Apply) -> None:
        self._changes = changes
        self._undo: list[AttributePatch | Undo] = []
        self._users = 0
        self._busy = False
        # Reentrant: garbage collection during `_update` may release a user.
        self._lock = threading.RLock()

    def add(self, *changes: AttributePatch | Apply) -> None:
        """Add patches, before the first user."""
        self._changes += changes

    def acquire(self) -> None:
        """Add a user."""
        with self._lock:
            self._users += 1
            if bool(self._undo) != (self._users > 0):
                self._update()

    def release(self) -> None:
        """Remove a user."""
        with self._lock:
            self._users -= 1
            if bool(self._undo) != (self._users > 0):
                self._update()

    def apply(self) -> Undo:
        """Add a user and return its removal, as a patch of another `SharedPatches`."""
        self.acquire()
        return self.release

    def _update(self) -> None:
        """Apply or undo the patches, without a call for each: it is on every step."""
        if self._busy:
            return
        self._busy = True
        try:
            while bool(self._undo) != (self._users > 0):
                is_over = bool(self._undo)
                while self._undo:
                    undo = self._undo.pop()
                    if not isinstance(undo, AttributePatch):
                        undo()
                    elif vars(undo.owner).get(undo.name) is undo.replacement:
                        setattr(undo.owner, undo.name, undo.original)
                for change in () if is_over else self._changes:
                    if isinstance(change, AttributePatch):
                        original = vars(change.owner)[change.name]
                        if change.original is not original:
                            change.original = original
                            change.replacement = change.wrap(original)
                        setattr(change.owner, change.name, change.replacement)
                        self._undo.append(change)
                    else:
                        self._undo.append(change())
        finally:
            self._busy = False

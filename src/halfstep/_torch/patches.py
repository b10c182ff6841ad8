"""Patches of torch that are applied while a context of halfstep is open.

All shared patches:

- `casting.recompute`: `nn.DataParallel` runs its replicas under the caller's
  context;
- `casting.recompute`: activation checkpointing recomputes segments under the policy of
  the forward pass;
- `casting.active_context`: higher-order operators do not see its dispatch key; in-place
  methods of `nn.Parameter` clear torch's cache of casts, and before torch 2.13 setting
  the grad mode does;
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


@dataclass(slots=True, eq=False)
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


class InheritedMethods:
    """Methods of a class that it inherits, wrapped, as patches for `SharedPatches`."""

    def __init__(self, owner: type, wrap: Callable[[Any], Any], *names: str) -> None:
        self._owner = owner
        self._wrappers = {name: wrap(getattr(owner, name)) for name in names}

    def apply(self) -> None:
        """Wrap them, but those that other code has put into the class itself."""
        owner, own = self._owner, vars(self._owner)
        for name, wrapper in self._wrappers.items():
            if name not in own:
                setattr(owner, name, wrapper)

    def undo(self) -> None:
        """Inherit them again."""
        owner, own = self._owner, vars(self._owner)
        for name, wrapper in self._wrappers.items():
            if own.get(name) is wrapper:
                delattr(owner, name)


class SharedPatches:
    """Patches that are applied while they have at least one user.

    What is interrupted can be called again: users are a set, and a patch that is
    applied, or undone, is left alone.

    Args:
        changes: Patches, or `SharedPatches` of which these are a user.
        users: The users, where the caller adds and removes them and calls `update`.
    """

    def __init__(
        self,
        *changes: AttributePatch | InheritedMethods | SharedPatches,
        users: dict[Any, None] | None = None,
    ) -> None:
        self._changes = changes
        self.users: dict[Any, None] = {} if users is None else users
        self._is_applied: bool | None = False
        """None: only some of the patches are."""
        self._busy = False
        # Reentrant: garbage collection during `update` may release a user.
        self._lock = threading.RLock()

    def add(self, *changes: AttributePatch) -> None:
        """Add patches, before the first user."""
        self._changes += changes

    def acquire(self, user: object) -> None:
        """Add a user, any hashable object; one that is there stays one user."""
        self.users[user] = None
        self.update()

    def release(self, user: object) -> None:
        """Remove a user, if it is there."""
        self.users.pop(user, None)
        self.update()

    def update(self) -> None:
        """Apply the patches if there are users, else undo them."""
        if self._is_applied == bool(self.users):
            return
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                while self._is_applied != bool(self.users):
                    has_users = bool(self.users)
                    self._is_applied = None
                    self._change(apply=has_users)
                    self._is_applied = has_users
            finally:
                self._busy = False

    def _change(self, *, apply: bool) -> None:
        """Apply the patches, or undo them, without a call for each: it is on a step."""
        for change in self._changes[:: 1 if apply else -1]:
            if isinstance(change, SharedPatches):
                change.acquire(self) if apply else change.release(self)
                continue
            if isinstance(change, InheritedMethods):
                change.apply() if apply else change.undo()
                continue
            current = vars(change.owner).get(change.name)
            if apply and current is not change.replacement:
                if change.original is not current:
                    change.replacement = change.wrap(current)
                    change.original = current
                setattr(change.owner, change.name, change.replacement)
            elif not apply and current is change.replacement:
                setattr(change.owner, change.name, change.original)

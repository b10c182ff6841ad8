"""Which policy casts now: the contexts that a thread is in, by device.

In: a context that opens or closes. Out: the `Frame` that `kernels` obeys.

The kernels stand at a dispatch key that no tensor has. A thread reaches them only
between `push` and `pop`, which switch that key in the thread's own dispatcher state;
plain `torch.autocast`, in the same thread or in others, never does.

Inside a backward pass a frame acts only where it was pushed in the same autograd node:
what is computed again gets the frame of its forward pass from `recompute`, and the
context around `backward()` has no say.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C import DispatchKey
from torch.library import Library, fallthrough_kernel

from halfstep.cast_cache import CastCache
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfstep.policy import Policy

KEY = DispatchKey.__members__["AutocastPrivateUse1"]
"""Above the autocast keys of all devices, so that a policy casts before torch does;
`torch._C._DisableAutocast` and the compiler switch it off with them."""
NO_BACKEND = "privateuseone"
"""What torch calls the backend of that key while there is none."""


class Observer(Protocol):
    """Takes down how operations run; `record.Recorder` is one."""

    def observe(
        self,
        name: str,
        frame: Frame,
        run: Callable[[], Any],
        arguments: object,
    ) -> Any:  # noqa: ANN401
        """Run an operation, and return what it returns."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one operation runs under a frame."""

    category: str
    rule: int | None
    """Index of the policy's rule that decided; None: a row of a table."""
    stock: bool
    """torch's own kernel does just this."""


@dataclass(eq=False, slots=True)
class Frame:
    """What a context decides, for the kernels that read it."""

    policy: Policy
    plan: Mapping[str, Row]
    """Operation -> how it runs. One without a row runs as torch's table says."""
    cache: CastCache | None
    matched: set[int]
    """Indices of the policy's rules that have decided something so far."""
    recorder: Observer | None = None
    module: str = ""
    """Path of the module whose rule made this frame; "" where none did."""
    types: tuple[str, ...] = ()
    """Class names of that module and of those around it."""
    outer: Frame | None = None
    """The frame around, where a module's rule made this one."""
    closed: bool = field(default=False, init=False)
    """The context is over, and its cache with it."""

    def close(self) -> None:
        """Take note that the context is over, which made the cache."""
        self.closed = True
        self.recorder = None
        if self.cache is not None:
            self.cache.clear()

    def for_recomputation(self) -> Frame:
        """Return the frame for a part of the forward pass that is computed again.

        Where the context is over, so is its cache: this part has one of its own, in
        which a weight that it uses twice is cast once, as it was.
        """
        root = self
        while root.outer is not None:
            root = root.outer
        if not root.closed:
            return self
        cache = None if self.cache is None else CastCache()
        return dataclasses.replace(self, cache=cache, recorder=None, outer=None)


class _Active(NamedTuple):
    frame: Frame | None
    node: int | None
    """Number of the autograd node that was running when it was pushed."""


_NOTHING = _Active(None, None)


_lock = threading.Lock()
_fallback: list[Library] = []
"""What lets all operations without a kernel at the key pass it, once there is one."""


def _check_key() -> None:
    """Make the dispatch key ready for use.

    Raises:
        UserError: If a backend of its own uses it.
    """
    backend = torch._C._get_privateuse1_backend_name()  # noqa: SLF001
    if backend != NO_BACKEND:
        message = (
            f"policies need a dispatch key that the backend {backend!r} uses: open "
            "autocast() without policy, cache and record, or do not load that backend."
        )
        raise UserError(message)
    with _lock:
        if not _fallback:
            library = Library("_", "IMPL")  # type: ignore[no-untyped-call]
            library.fallback(fallthrough_kernel, KEY.name)  # type: ignore[no-untyped-call]
            _fallback.append(library)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.active: dict[str, _Active] = {}
        """Device type -> the innermost frame."""


_thread = _Thread()


class Pushed(NamedTuple):
    """What `pop` needs."""

    device: str
    active: dict[str, _Active]
    """The table of the thread that pushed: `pop` may run in another one."""
    before: _Active
    frame: Frame | None
    key: tuple[bool, bool]
    """Whether the key was included and excluded before."""


def push(device: str, frame: Frame | None) -> Pushed:
    """Put a frame in force in this thread; None: no policy.

    Raises:
        UserError: If a backend of its own uses the dispatch key.
    """
    _check_key()
    active = _thread.active
    before = active.get(device, _NOTHING)
    active[device] = _Active(frame, _node_number())
    if frame is not None and frame.cache is not None:
        frame.cache.begin()
    key = _key_state()
    _set_key(included=any(each.frame for each in active.values()), excluded=False)
    return Pushed(device, active, before, frame, key)


def pop(pushed: Pushed) -> None:
    """Put in force what was so before a `push`, in the thread of that."""
    device, active, before, frame, (included, excluded) = pushed
    active[device] = before
    cache = None if frame is None else frame.cache
    if cache is not None and (before.frame is None or before.frame.cache is not cache):
        cache.end()
    if active is _thread.active:
        _set_key(included=included, excluded=excluded)


def _key_state() -> tuple[bool, bool]:
    included = torch._C._dispatch_tls_is_dispatch_key_included(KEY)  # noqa: SLF001
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)  # noqa: SLF001
    return included, excluded


def _set_key(*, included: bool, excluded: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, excluded)  # noqa: SLF001


def _node_number() -> int | None:
    """Return the number of the autograd node that is running, if one is."""
    node = torch._C._current_autograd_node()  # noqa: SLF001
    return None if node is None else node._sequence_nr()  # noqa: SLF001


def current(device: str) -> Frame | None:
    """Return the frame that this thread pushed last."""
    return _thread.active.get(device, _NOTHING).frame


def in_force(device: str) -> Frame | None:
    """Return the frame that an operation in this thread runs under, if any."""
    frame, node = _thread.active.get(device, _NOTHING)
    return frame if frame is not None and node == _node_number() else None


def casting() -> list[tuple[str, Frame]]:
    """Return each device on which a policy casts now, and the frame in force."""
    number = _node_number()
    return [
        (device, frame)
        for device, (frame, node) in _thread.active.items()
        if frame is not None and node == number and torch.is_autocast_enabled(device)
    ]

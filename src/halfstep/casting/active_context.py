"""Keeps a stack of cast contexts for each thread and device.

`dispatch_kernels` reads the active `CastContext` from it.

The kernels are registered at a dispatch key that no tensor has. A thread reaches them
only between `push` and `pop`, which include that key in the thread's own dispatcher
state; plain `torch.autocast`, in the same thread or in others, never does.

Inside a backward pass, a context is active only if it was pushed in that same pass:
recomputed code gets the context of its forward pass from `recompute`, and the context
around `backward()` has no effect.

Two states of torch's follow the stack: its cache of casts, which is cleared when a
weight or the dtype may have changed, and what makes torch.compile compile again for
another policy.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import threading
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch._ops
from torch._C import DispatchKey
from torch.autograd import grad_mode
from torch.library import Library, fallthrough_kernel

from halfstep._torch import optimizer_hooks
from halfstep._torch.patches import AttributePatch, SharedPatches
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError
from halfstep.policy import op_tables
from halfstep.policy.rules import TORCH, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C import DispatchKeySet

T = TypeVar("T")

KEY = DispatchKey.__members__["AutocastPrivateUse1"]
"""Precedes the autocast keys of all devices, so that a policy casts before torch does;
`torch._C._DisableAutocast` and the compiler exclude it together with them."""
NO_BACKEND = "privateuseone"
"""torch's name for the backend of that key while none is registered."""

num_planned = 0
"""Modules that `graph.rewrite` has made in this process: they cast without a context.
Sessions read it before they warn that no context was opened."""


@dataclass(frozen=True, slots=True)
class OpCast:
    """How one operation is cast in a context."""

    category: str
    rule_index: int | None
    """Index of the policy's rule that decided; None: the op table decided."""
    is_torch_default: bool
    """Whether torch's own autocast kernel does the same."""


@dataclass(eq=False, slots=True)
class CastContext:
    """The settings of one autocast context that the dispatch kernels read."""

    policy: Policy
    op_casts: Mapping[str, OpCast]
    """Operation -> its cast. Operations without an entry run as torch's table says."""
    cache: CastCache | None
    matched_rules: set[int]
    """Indices of the policy's rules that have applied so far."""
    observe: Callable[[str, CastContext, Callable[[], Any], object], Any] | None = None
    """`Recorder.observe`, if operations are recorded."""
    module: str = ""
    """Path of the module whose rule created this context; "" if none did."""
    types: tuple[str, ...] = ()
    """Class names of that module and of the enclosing ones."""
    outer: CastContext | None = None
    """The enclosing context, if a module rule created this one."""
    closed: bool = field(default=False, init=False)
    """The context has ended, and its cache is empty."""
    abandoned: list[tuple[int, Callable[[], object]]] = field(
        default_factory=list, init=False
    )
    """(thread id, function that undoes a module rule's pre-hook). Entries left when the
    context closes belong to modules whose forward hook an exception skipped."""

    def close(self) -> None:
        """Mark the context as ended and clear its cache."""
        self.closed = True
        self.observe = None
        if self.cache is not None:
            self.cache.clear()

    @property
    def root(self) -> CastContext:
        """The outermost context of a chain made by module rules."""
        context = self
        while context.outer is not None:
            context = context.outer
        return context

    def for_recomputation(self) -> CastContext:
        """Return the context under which a part of the forward pass is recomputed.

        If the context has ended, the part gets a new cache, so that a weight that it
        uses twice is cast once, as in the forward pass.
        """
        if not self.root.closed:
            return self
        cache = None if self.cache is None else CastCache()
        return dataclasses.replace(self, cache=cache, observe=None, outer=None)


_lock = threading.Lock()
_fallback: list[Library] = []
"""Registers a fallthrough at the key for operations without a kernel; at most one."""


def check_key() -> None:
    """Prepare the dispatch key for use.

    Raises:
        UserError: If an out-of-tree backend uses it.
    """
    backend = torch._C._get_privateuse1_backend_name()  # noqa: SLF001
    if backend != NO_BACKEND:
        raise UserError(
            f"policies need a dispatch key that the backend {backend!r} uses: open "
            "autocast() without policy, cache and record, or do not load that backend."
        )
    with _lock:
        if not _fallback:
            library = Library("_", "IMPL")  # type: ignore[no-untyped-call]
            library.fallback(fallthrough_kernel, KEY.name)  # type: ignore[no-untyped-call]
            _fallback.append(library)


def _without_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def key_extractor(tensors: Any, key_mask: DispatchKeySet) -> Any:  # noqa: ANN401
        return original(tensors, key_mask.remove(KEY))

    return key_extractor


# torch's cache of casts
#
# It is keyed by the weight alone, so that it returns the value from before a change,
# and the dtype of the enclosing context. A check at each operation would cost more than
# the operation. Trainable weights are normally written to only by an optimizer or with
# grad mode off, so the cache is cleared after either. Writes between two operations
# under one `no_grad`, or through `weight.data` or `weight.detach()`, are not detected;
# a `CastCache` detects all but writes through `weight.data`.

_open: set[Pushed] = set()
"""The enabled contexts of all threads, since torch's cache is shared by them."""

_NO_WRITERS = frozenset(("torch.autograd.grad_mode", "torch.utils.checkpoint"))
"""Modules that set the grad mode but write no weights. The exits of the first are
patched themselves; the second sets it whenever a tensor is saved, in the middle of an
operation that may use a cast many times."""


def _clearing(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def run_and_clear(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        run(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") not in _NO_WRITERS:  # noqa: SLF001
            _clear_torch_cache()

    return run_and_clear


_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView  # noqa: SLF001
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # noqa: SLF001
"""Whether a key is excluded: that of autograd only where Python handles an operation.

While torch casts a weight it holds the lock of its cache. A `__torch_dispatch__` or a
kernel of torch.library that handles that cast would wait for this lock forever. There
the cache is not cleared, but not used any more until the context ends.
"""


def _clear_torch_cache(*_: object) -> None:
    # Whatever thread writes, it may write into what a context in another has cast.
    if not _open:
        return
    if not _is_excluded(_BELOW_AUTOGRAD):
        torch.clear_autocast_cache()
    elif in_context():
        torch.set_autocast_cache_enabled(False)


optimizer_hooks.register_post_step_callback(_clear_torch_cache)


def in_context() -> bool:
    """Return whether this thread is in an enabled halfstep context."""
    return any(pushed and pushed.dtype for pushed in _thread.state.innermost.values())


patches = SharedPatches(
    # Higher-order operators require a kernel at each key that a thread includes.
    AttributePatch(torch._ops, "key_extractor", _without_key),  # noqa: SLF001
    optimizer_hooks.STEP_PATCH.apply,
    AttributePatch(grad_mode.no_grad, "__exit__", _clearing),
    AttributePatch(grad_mode.set_grad_enabled, "__exit__", _clearing),
    AttributePatch(grad_mode.inference_mode, "__exit__", _clearing),
    # As a function call, it has no exit: `torch.set_grad_enabled(True)`.
    AttributePatch(grad_mode.set_grad_enabled, "__init__", _clearing),
)
"""Applied while any thread has a context; `recompute` adds its own."""


# What torch.compile compares
#
# Before it runs compiled code, torch compares the autocast state of all device types
# with that at compile time, also for code from the cache on disk; it does not know
# policies. So a number made from the policy's text (28560 are possible) is encoded as
# the autocast state of four device types that this machine does not have. A version of
# torch may lack some of these types, hence the list of candidates.

_CANDIDATE_DEVICES = ("ipu", "maia", "mtia", "hpu", "mps", "xpu", "xla")
_NUM_DEVICES = 4
_DIGIT_DTYPES = (
    *(None, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def _is_spare(device: str) -> bool:
    """Return whether a device type has autocast state, but no device here."""
    if not torch.amp.is_autocast_available(device):
        return False
    machine = {"mps": torch.backends.mps, "xpu": torch.xpu}.get(device)
    return machine is None or not machine.is_available()


_SPARE_DEVICES = tuple(islice(filter(_is_spare, _CANDIDATE_DEVICES), _NUM_DEVICES))
_DEFAULT_DTYPES = {
    device: torch.get_autocast_dtype(device) for device in _SPARE_DEVICES
}
_CACHE_IGNORES_DTYPES = torch.__version__ < "2.13"
"""The key of torch's cache of traced graphs on disk, `enable_autograd_cache`, lacks the
dtypes of autocast: with 2.9.1 a policy got what another had compiled. 2.10 to 2.12 were
not tried."""
_MAX_NUMBER = len(_DIGIT_DTYPES) ** len(_SPARE_DEVICES) - 1

_policy_numbers = {TORCH: 0}


def policy_number() -> int:
    """Return the number that is encoded in this thread; 0: no policy is active."""
    return _thread.state.policy_number


def set_policy_number(number: int) -> None:
    """Encode a number in the autocast state of the spare device types."""
    if number == _thread.state.policy_number:
        return
    _thread.state.policy_number = number
    for device in _SPARE_DEVICES:
        number, digit = divmod(number, len(_DIGIT_DTYPES))
        dtype = _DIGIT_DTYPES[digit]
        torch.set_autocast_enabled(device, dtype is not None)
        torch.set_autocast_dtype(device, dtype or _DEFAULT_DTYPES[device])


def _number_of(policy: Policy) -> int:
    """Return the number >= 1 of a policy.

    It is the same in every process, unless two policies of one process would share it.
    """
    if policy not in _policy_numbers:
        # The tables count too: another version of halfstep may have others.
        text = f"{policy} {op_tables.NAMED[policy.base]}"
        digest = hashlib.sha256(text.encode()).digest()
        number: int = 1 + int.from_bytes(digest[:8], "big") % _MAX_NUMBER
        while number in _policy_numbers.values():
            number = 1 + number % _MAX_NUMBER
        _policy_numbers[policy] = number
    return _policy_numbers[policy]


def _compile_settings() -> dict[str, Any]:
    """Make torch.compile trace backward passes without autocast; return old settings.

    Why: by default it traces them under the autocast of the context around the compiled
    function, which computes the gradients of fp32 operations in 16 bits.
    """
    settings: dict[str, Any] = {}
    config: Any = sys.modules.get("torch._functorch.config")
    if getattr(config, "backward_pass_autocast", None) == "same_as_forward":
        settings["backward_pass_autocast"] = config.backward_pass_autocast
        config.backward_pass_autocast = "off"  # noqa: S105 -- no password
    if _CACHE_IGNORES_DTYPES and getattr(config, "enable_autograd_cache", False):
        settings["enable_autograd_cache"] = config.enable_autograd_cache
        config.enable_autograd_cache = False
    return settings


# The stack


class _ThreadState:
    """The contexts of one thread."""

    def __init__(self) -> None:
        self.policy_number = 0
        self.innermost: dict[str, Pushed | None] = {}
        """Device type -> the innermost context."""
        self.popped: list[
            tuple[int | None, dict[str, Any], Callable[[], object] | None]
        ] = []
        """What this thread must restore and call, since another popped its context."""

    def __del__(self) -> None:
        for _ in self.popped:
            patches.release()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread = _Thread()


@dataclass(eq=False, slots=True)
class Pushed:
    """A context pushed in one thread, on one device: returned by `push`."""

    context: CastContext | None
    device: str
    state: _ThreadState
    """State of the thread that pushed: `pop` may run in another thread."""
    graph_task: int
    """Id of the backward pass that was running when it was pushed; -1: none."""
    outer: Pushed | None
    dtype: torch.dtype | None
    """The dtype of torch's autocast inside; None: no halfstep context enabled it."""
    outer_number: int | None = None
    """Number of the policy outside; None: this context encodes no policy."""
    compile_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of torch.compile to restore."""
    is_popped: bool = False

    @property
    def cache(self) -> CastCache | None:
        """The context's cache of casts."""
        return None if self.context is None else self.context.cache


def is_in_other_dtype(dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return whether a context of this thread has another dtype than its device here.

    False where torch may hold the lock of its cache; see `_is_excluded`.

    Args:
        dtypes: Device type -> dtype of torch's autocast.
    """
    open_contexts = ((_thread.state.innermost.get(d), t) for d, t in dtypes.items())
    return not _is_excluded(_BELOW_AUTOGRAD) and any(
        pushed is not None and pushed.dtype != dtype for pushed, dtype in open_contexts
    )


def push(
    device: str,
    context: CastContext | None,
    compile_policy: Policy | None = None,
    dtype: torch.dtype | None = None,
) -> Pushed:
    """Make a context the active one of this thread, and patch torch until `pop`.

    Args:
        device: Device type.
        context: None: no policy.
        compile_policy: The policy for which torch.compile compiles. None: as before.
        dtype: Of torch's autocast, if it was enabled for this context. None: as before.

    Raises:
        UserError: If an out-of-tree backend uses the dispatch key.
    """
    if context is not None:
        check_key()
    state = _thread.state
    if state.popped:
        run_pending()
    outer = state.innermost.get(device)
    outer_dtype = None if outer is None else outer.dtype
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    pushed = Pushed(context, device, state, task, outer, dtype or outer_dtype)
    if dtype is not None:
        is_shared = dtype != outer_dtype and _is_excluded(_BELOW_AUTOGRAD)
        if dtype != outer_dtype and not is_shared:
            torch.clear_autocast_cache()
        # Another thread's context with another dtype shares the cache.
        if is_shared or any(
            other.device == device and other.dtype != dtype and other.state is not state
            for other in list(_open)
        ):
            torch.set_autocast_cache_enabled(False)
        _open.add(pushed)
    if compile_policy is not None:
        pushed.outer_number = state.policy_number
        set_policy_number(_number_of(compile_policy))
    state.innermost[device] = pushed
    if context is not None:
        pushed.compile_settings = _compile_settings()
        if context.cache is not None:
            context.cache.open()
    _update_dispatch_key()
    patches.acquire()
    return pushed


def pop(pushed: Pushed, undo: Callable[[], object] | None = None) -> None:
    """Remove a pushed context; contexts may be popped in any order, by any thread.

    Args:
        pushed: Return value of `push`.
        undo: Called in the thread that pushed: now, or on its next call of this module
            if this is another thread. If that thread has ended, it is not called.
    """
    state = pushed.state
    pushed.is_popped = True
    remaining = state.innermost.get(pushed.device)
    while remaining is not None and remaining.is_popped:
        remaining = remaining.outer
    state.innermost[pushed.device] = remaining
    cache = pushed.cache
    if cache is not None and (remaining is None or remaining.cache is not cache):
        cache.close()
    if pushed in _open:
        _open.discard(pushed)
        dtype = None if remaining is None else remaining.dtype
        if dtype != pushed.dtype and not _is_excluded(_BELOW_AUTOGRAD):
            torch.clear_autocast_cache()
    had_policy = pushed.context or pushed.outer_number is not None or undo
    if not had_policy and (remaining is None or remaining.context is None):
        patches.release()  # the thread that pushed has nothing to restore
        return
    state.popped.append((pushed.outer_number, pushed.compile_settings, undo))
    if state is _thread.state:
        run_pending()


def run_pending() -> None:
    """Restore this thread's state for contexts popped since, perhaps by others."""
    state = _thread.state
    if not state.popped:
        return
    is_open = _update_dispatch_key()
    while state.popped:
        outer_number, settings, undo = state.popped.pop(0)
        try:
            if outer_number is not None:
                set_policy_number(outer_number if is_open else 0)
            for name, value in settings.items():
                setattr(sys.modules["torch._functorch.config"], name, value)
            if undo is not None:
                undo()
        finally:
            patches.release()


def _update_dispatch_key() -> bool:
    """Include the key in this thread's state if it has a context; return whether."""
    included = False
    for pushed in _thread.state.innermost.values():
        included |= pushed is not None and pushed.context is not None
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not included)  # noqa: SLF001
    return included


def active(device: str) -> CastContext | None:
    """Return the context that applies to operations of this thread now, or None."""
    pushed = _thread.state.innermost.get(device)
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    return pushed.context if pushed and pushed.graph_task == graph_task else None


def active_contexts() -> list[tuple[str, CastContext]]:
    """Return (device, active context) for each device on which a policy casts now."""
    state = _thread.state
    if state.popped:
        run_pending()
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    contexts = []
    for device, pushed in state.innermost.items():
        if (
            pushed is not None
            and pushed.context is not None
            and pushed.graph_task == graph_task
            and torch.is_autocast_enabled(device)
        ):
            contexts.append((device, pushed.context))
    return contexts


class PerThreadStack(Generic[T]):
    """A stack for each thread; a thread without entries pops from another thread's.

    Why: a generator with an open context may be finished, or garbage-collected, in
    another thread than it was started in.

    Copies (`copy.deepcopy`, `pickle`) are empty.
    """

    def __init__(self) -> None:
        # Keyed by the thread object: thread ids are reused after a thread ends.
        self._stacks: dict[threading.Thread, list[T]] = {}

    def __reduce__(self) -> tuple[type[PerThreadStack[T]], tuple[()]]:
        return PerThreadStack, ()

    def push(self, entry: T) -> None:
        """Push an entry of this thread."""
        self._stacks.setdefault(threading.current_thread(), []).append(entry)

    def pop_own(self) -> T | None:
        """Pop the last entry of this thread; None if it has none."""
        return self._pop_of(threading.current_thread())

    def pop(self) -> T:
        """Pop the last entry of this thread, else of another, ended threads first.

        Raises:
            IndexError: If there is none.
        """
        current = threading.current_thread()
        others = sorted(self._stacks, key=threading.Thread.is_alive)
        for thread in (current, *others):
            entry = self._pop_of(thread)
            if entry is not None:
                return entry
        raise IndexError("a context was closed more often than it was opened")

    def _pop_of(self, thread: threading.Thread) -> T | None:
        stack = self._stacks.get(thread)
        if stack is None:
            return None
        # Another thread may pop concurrently, so no earlier check is relied on.
        entry = stack.pop() if stack else None
        if not stack:
            self._stacks.pop(thread, None)
        return entry

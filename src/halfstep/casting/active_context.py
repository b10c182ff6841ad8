"""Keeps a stack of cast contexts for each thread and device.

`dispatch_kernels` reads the active `CastContext` from it.

The kernels are registered at a dispatch key that no tensor has. A thread reaches them
only between `push` and `pop`, which include that key in the thread's own dispatcher
state; plain `torch.autocast`, in the same thread or in others, never does.

Inside a backward pass, a context is active only if it was pushed in that same pass:
recomputed code gets the context of its forward pass from `recompute`, and the context
around `backward()` has no effect.

Ctrl-C may come between any two calls. So an entry of the stack first records the state
outside, and then sets its own; `pop` restores what was recorded, and may be called
again if it was interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any, TypeAlias

import torch._ops
from torch._C import DispatchKey
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.autograd import grad_mode
from torch.library import Library, fallthrough_kernel
from torch.nn import Parameter

from halfstep._torch import optimizer_hooks
from halfstep._torch.patches import AttributePatch, InheritedMethods, SharedPatches
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError
from halfstep.policy import op_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch._C import DispatchKeySet

    from halfstep.policy.rules import Policy

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
    """`RecordingMode.observe`, if operations are recorded."""
    module: str = ""
    """Path of the module whose rule created this context; "" if none did."""
    types: tuple[str, ...] = ()
    """Class names of that module and of the enclosing ones."""
    outer: CastContext | None = None
    """The enclosing context, if a module rule created this one."""
    nodes: list[int] = field(default_factory=list, init=False)
    """The first of autograd's sequence numbers inside, and their end."""
    closed: bool = field(default=False, init=False)
    """The context has ended, and its cache is empty."""

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
# and the dtype of the enclosing context. So it is cleared where the dtype changes, and
# after what usually writes to weights: a step of an optimizer, and in-place methods
# of parameters. Not after `no_grad`: helpers of a forward pass only read there.
# Other writes, such as those through `weight.data` or `torch._foreach_mul_`, are not
# noticed, as in torch; a `CastCache` compares version counters.

_open: dict[Entry, None] = {}
"""The entries of all threads, in the order of opening."""

_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView  # noqa: SLF001
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # noqa: SLF001
"""Whether a key is excluded: that of autograd only where Python handles an operation.

While torch casts a weight it holds the lock of its cache. A `__torch_dispatch__` or a
kernel of torch.library that handles that cast would wait for this lock forever. There
the cache is not cleared, but not used any more until the context ends.
"""


def _clear_torch_cache(*_: object) -> None:
    # Whatever thread steps, it may write into what a context in another has cast.
    if not _open:
        return
    if not _is_excluded(_BELOW_AUTOGRAD):
        torch.clear_autocast_cache()
    elif in_context():
        torch.set_autocast_cache_enabled(False)


optimizer_hooks.register_post_step_callback(_clear_torch_cache)


def in_context() -> bool:
    """Return whether this thread is in an enabled halfstep context."""
    return any(entry.dtype for entry in _thread_state().innermost.values())


def _clearing_after_write(write: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(write)
    def write_and_clear(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        result = write(*args, **kwargs)
        _clear_torch_cache()
        return result

    return write_and_clear


_WRITES = (
    *("add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "lerp_", "clamp_"),
    *("normal_", "uniform_", "__iadd__", "__isub__", "__imul__", "__setitem__"),
)
"""In-place methods by which programs write to weights. Each more costs every context
half a microsecond, so rare ones are left out."""


def _clearing(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def run_and_clear(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        run(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") not in _INNER_CALLERS:  # noqa: SLF001
            _clear_torch_cache()

    return run_and_clear


_INNER_CALLERS = frozenset(("torch.autograd.grad_mode", "torch.utils.checkpoint"))
"""Modules that set the grad mode inside a call that is patched itself, and whenever a
tensor is saved, in the middle of an operation that may use a cast many times."""
_CACHES_WITHOUT_GRAD = torch.__version__ < "2.13"
"""torch 2.9 keeps a cast made with grad mode off: the weight then gets no gradient. So
its cache is cleared when grad mode is set. 2.10 to 2.12 were not tried."""

patches = SharedPatches(
    # Higher-order operators require a kernel at each key that a thread includes.
    AttributePatch(torch._ops, "key_extractor", _without_key),  # noqa: SLF001
    optimizer_hooks.STEP_PATCH,
    users=_open,
)
"""Applied while any thread has a context; `recompute` adds its own."""
_write_patches = SharedPatches(
    InheritedMethods(Parameter, _clearing_after_write, *_WRITES)
)
"""Applied while torch's cache serves any context."""
if _CACHES_WITHOUT_GRAD:
    patches.add(
        AttributePatch(grad_mode.no_grad, "__exit__", _clearing),
        AttributePatch(grad_mode.set_grad_enabled, "__exit__", _clearing),
        AttributePatch(grad_mode.inference_mode, "__exit__", _clearing),
        # As a function call, it has no exit: `torch.set_grad_enabled(True)`.
        AttributePatch(grad_mode.set_grad_enabled, "__init__", _clearing),
    )


# What torch.compile compares
#
# torch does not know policies. Before it runs compiled code, it compares the autocast
# state of all device types with that at compile time, dtypes only where autocast is on.
# In a context with a policy it is on for the device type of our dispatch key, which has
# no backend; its dtype is the number of the policy in this process. Code from the cache
# on disk is found by a tag, too, which names the policy in every process.

_NUMBERS = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4),
    *(torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2),
)
_compile_keys: dict[Policy, tuple[torch.dtype, str]] = {}
"""Policy -> its number and tag."""
_CACHE_IGNORES_DTYPES = torch.__version__ < "2.13"
"""The key of torch's cache of traced graphs on disk lacks the dtypes of autocast: with
2.9.1 a policy got what another had compiled. 2.10 to 2.12 were not tried."""

_compiler_config: Any = torch.compiler.config
_CONFIG_IS_PER_THREAD = isinstance(
    getattr(_compiler_config._config["job_id"], "user_override", None),  # noqa: SLF001
    ContextVar,
)
"""Older versions of torch have one config for all threads."""
_TAG = (setattr, _compiler_config, "cache_key_tag")
_NUMBER = (torch.set_autocast_dtype, NO_BACKEND)


def _compile_key(policy: Policy) -> tuple[torch.dtype, str]:
    """Return the number of a policy, and the tag that names it in every process."""
    with _lock:
        if policy not in _compile_keys:
            if len(_compile_keys) == len(_NUMBERS):
                _free_numbers()
            used = {number for number, _ in _compile_keys.values()}
            # The tables count too: another version of halfstep may have others.
            text = f"{policy} {op_tables.NAMED[policy.base]}"
            tag = f"halfstep {hashlib.sha256(text.encode()).hexdigest()}"
            number = next(each for each in _NUMBERS if each not in used)
            _compile_keys[policy] = number, tag
        return _compile_keys[policy]


def _free_numbers() -> None:
    """Forget the policies that are not in use, and what was compiled under them."""
    used = {entry.compile_policy for entry in list(_open)}
    for policy in _compile_keys.keys() - used:
        del _compile_keys[policy]
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _compile_settings(policy: Policy) -> dict[tuple[Any, ...], Any]:
    """Return function and its first arguments -> last argument, to compile so.

    torch.compile also traces backward passes without autocast. Why: by default it
    traces them under the autocast of the context around the compiled function, which
    computes the gradients of fp32 operations in 16 bits.
    """
    number, tag = _compile_key(policy)
    settings: dict[tuple[Any, ...], Any] = {_NUMBER: number}
    config: Any = sys.modules.get("torch._functorch.config")
    if _CACHE_IGNORES_DTYPES:
        if getattr(config, "enable_autograd_cache", False):
            settings[setattr, config, "enable_autograd_cache"] = False
    else:
        settings[_TAG] = tag
    if getattr(config, "backward_pass_autocast", None) in ("same_as_forward", "off"):
        settings[setattr, config, "backward_pass_autocast"] = "off"
    return settings


def compile_policy() -> Policy | None:
    """Return the policy for which this thread compiles; None: torch's, no policy."""
    stack = _thread_state().stack
    policies = (entry.compile_policy for entry in reversed(stack))
    return next((each for each in policies if each is not None), None)


# The stack


RuleCall: TypeAlias = "tuple[object, Callable[[], object], CastContext | None]"
"""A running module with a rule: hook, what ends the call, outermost context."""


class _ThreadState:
    """The contexts of one thread."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.stack: list[Entry] = []
        self.innermost: dict[str, Entry] = {}
        """Device type -> the innermost entry."""
        self.rules: list[RuleCall] = []
        self.popped_elsewhere: list[Entry] = []
        """Entries that other threads have closed; this thread restores the state."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread = _Thread()


def _thread_state() -> _ThreadState:
    """Return this thread's state, restored for entries that other threads closed."""
    state = _thread.state
    while state.popped_elsewhere:
        pop(state.popped_elsewhere[0])
        del state.popped_elsewhere[0]
    return state


@dataclass(eq=False, slots=True)
class Entry:
    """A context in the stack of one thread, on one device: returned by `push`."""

    context: CastContext | None
    device: str
    state: _ThreadState
    """Of the thread that pushed: `pop` may run in another."""
    graph_task: int
    """Id of the backward pass that was running when it was pushed; -1: none."""
    dtype: torch.dtype | None
    """The dtype of torch's autocast inside; None: no halfstep context enabled it."""
    compile_policy: Policy | None
    owner: object
    """What `entry_of` finds it by."""
    num_rules: int
    """Calls of modules with a rule in which it was pushed."""
    uses_torch_cache: bool
    """Whether torch's cache serves casts of weights inside."""
    steps: Iterable[object]
    """Calls what is to be called once: each item it yields is the result of a call. A
    `map` that is asked again continues, so that an interrupt repeats no call."""
    outside: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Function and its first arguments -> last argument that restores the state."""
    is_closed: bool = False
    is_restored: bool = False
    """Nothing is left to do for its end."""


_CONTEXT, _DEVICE = attrgetter("context"), attrgetter("device")


def nesting() -> int:
    """Return the number of autocast contexts around, torch's included."""
    # A signal is handled after a call: here after both, in one instruction.
    _, depth = map(call, (torch.autocast_increment_nesting, _decrement_nesting))
    return depth


_decrement_nesting = torch.autocast_decrement_nesting


def is_in_other_dtype(dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return whether a context of this thread has another dtype than its device here.

    False where torch may hold the lock of its cache; see `_is_excluded`.

    Args:
        dtypes: Device type -> dtype of torch's autocast.
    """
    innermost = _thread_state().innermost
    open_contexts = ((innermost.get(d), t) for d, t in dtypes.items())
    return not _is_excluded(_BELOW_AUTOGRAD) and any(
        entry is not None and entry.dtype != dtype for entry, dtype in open_contexts
    )


def push(
    device: str,
    context: CastContext | None,
    compile_policy: Policy | None = None,
    *,
    torch_context: torch_autocast | None = None,
    uses_torch_cache: bool = False,
    owner: object = None,
    then: Iterable[Callable[[], object]] = (),
) -> Entry:
    """Make a context the active one of this thread, and patch torch until `pop`.

    Args:
        device: Device type.
        context: None: no policy.
        compile_policy: The policy for which torch.compile compiles. None: as before.
        torch_context: Sets torch's autocast state. None: it stays.
        uses_torch_cache: Whether torch's cache serves casts of weights.
        owner: What `entry_of` finds the entry by.
        then: Called once by `pop`, in this thread. If the thread has ended, they are
            not called.

    Raises:
        UserError: If an out-of-tree backend uses the dispatch key.
    """
    if context is not None:
        check_key()
    state = _thread_state()
    outer = state.innermost.get(device)
    outer_dtype = None if outer is None else outer.dtype
    dtype = None
    if torch_context is not None and torch_context._enabled:  # noqa: SLF001
        dtype = torch_context.fast_dtype
    settings = {} if compile_policy is None else _compile_settings(compile_policy)
    entry = Entry(
        context,
        device,
        state,
        torch._C._current_graph_task_id(),  # noqa: SLF001
        dtype or outer_dtype,
        compile_policy,
        owner,
        len(state.rules),
        uses_torch_cache,
        map(call, then),
    )
    entry.outside = _outside_of(entry, settings, sets_torch=torch_context is not None)
    depth = nesting()
    try:
        if torch_context is not None:
            torch_autocast.__enter__(torch_context)  # type: ignore[no-untyped-call]
            entry.steps = map(call, (*then, _decrement_nesting))
        if dtype is not None:
            _separate_casts(entry, dtype, outer_dtype)
        for (function, *args), value in settings.items():
            function(*args, value)
        if context is not None and context.cache is not None:
            context.cache.open()
        _open[entry] = None
        state.stack.append(entry)
        _update_innermost(state)
        patches.update()
        if uses_torch_cache:
            _write_patches.acquire(entry)
    except BaseException:
        for _ in range(nesting() - depth):
            _decrement_nesting()
        entry.steps = map(call, then)
        pop(entry)
        raise
    return entry


def _outside_of(
    entry: Entry, settings: Iterable[tuple[Any, ...]], *, sets_torch: bool
) -> dict[tuple[Any, ...], Any]:
    """Return what restores the settings, and torch's state, as they are now."""
    outside: dict[tuple[Any, ...], Any] = {}
    for key in settings:
        is_config = key[0] is setattr
        outside[key] = (
            getattr(*key[1:]) if is_config else torch.get_autocast_dtype(NO_BACKEND)
        )
    if sets_torch:
        device = entry.device
        outside[torch.set_autocast_enabled, device] = torch.is_autocast_enabled(device)
        outside[torch.set_autocast_dtype, device] = torch.get_autocast_dtype(device)
        outside[torch.set_autocast_cache_enabled,] = torch.is_autocast_cache_enabled()
    return outside


def _separate_casts(
    entry: Entry, dtype: torch.dtype, outer_dtype: torch.dtype | None
) -> None:
    """Keep casts to a dtype apart from others in torch's cache, which all share."""
    is_shared = dtype != outer_dtype and _is_excluded(_BELOW_AUTOGRAD)
    if dtype != outer_dtype and not is_shared:
        torch.clear_autocast_cache()
    for other in list(_open):
        # Another thread's context may have another dtype.
        if other.device == entry.device and other.state is not entry.state:
            is_shared |= other.dtype not in (None, dtype)
    if is_shared:
        torch.set_autocast_cache_enabled(False)


def pop(entry: Entry | None) -> None:
    """Close an entry; entries may be closed in any order, by any thread.

    It does nothing if the entry is closed. If it is interrupted, call it again.
    """
    if entry is None or entry.is_restored:
        return
    state = entry.state
    if state is not _thread.state:
        if not entry.is_closed:
            entry.is_closed = True
            state.popped_elsewhere.append(entry)
        if not state.thread.is_alive():
            _leave_patches(entry)
        return
    entry.is_closed = True
    is_last = len(state.rules) == entry.num_rules and state.stack[-1:] == [entry]
    if entry.owner is not None and entry.context is not None and not is_last:
        _leave_modules(entry, entry.context.root)
    _restore_outside(entry)
    for _ in entry.steps:
        pass
    if entry in state.stack:
        state.stack.remove(entry)
    _update_innermost(state)
    _end_casts(entry, state.innermost.get(entry.device))
    _leave_patches(entry)


def _leave_patches(entry: Entry) -> None:
    if entry.uses_torch_cache:
        _write_patches.release(entry)
    _open.pop(entry, None)
    patches.update()
    entry.is_restored = True


def _leave_modules(entry: Entry, root: CastContext) -> None:
    """End calls of modules with a rule whose forward hook did not run.

    Why: torch runs it after errors, but not after Ctrl-C.
    """
    state = entry.state
    calls = state.rules[entry.num_rules :]
    for call_ in reversed(calls):
        if call_[2] is root:
            call_[1]()
    state.rules[entry.num_rules :] = [call_ for call_ in calls if call_[2] is not root]
    later = state.stack[state.stack.index(entry) + 1 :] if entry in state.stack else []
    for other in reversed(later):
        if other.owner is None and other.context and other.context.root is root:
            pop(other)  # interrupted before its call was stored


def _restore_outside(entry: Entry) -> None:
    """Restore the state; what a later entry has set is left to the end of that one."""
    stack = entry.state.stack
    for key, value in entry.outside.items():
        is_global = key[0] is setattr and not _CONFIG_IS_PER_THREAD
        entries = list(_open) if is_global else stack
        if entries and entries[-1] is not entry and entry in entries:
            later = entries[entries.index(entry) + 1 :]
            heir = next((other for other in later if key in other.outside), None)
            if heir is not None:
                heir.outside[key] = value
                continue
        function, *args = key
        function(*args, value)
    entry.outside = {}


def _end_casts(entry: Entry, outer: Entry | None) -> None:
    """Close the cache of an entry, and empty torch's, unless the outer one uses it."""
    cache = None if entry.context is None else entry.context.cache
    outer_context = None if outer is None else outer.context
    if cache is not None and (
        outer_context is None or outer_context.cache is not cache
    ):
        cache.close()
    is_other = entry.dtype != (None if outer is None else outer.dtype)
    if (is_other or not nesting()) and not _is_excluded(_BELOW_AUTOGRAD):
        torch.clear_autocast_cache()


def thread_rules() -> list[RuleCall]:
    """Return the calls of modules with a rule that this thread is in."""
    return _thread.state.rules


def entry_of(owner: object) -> Entry | None:
    """Return the entry that an owner has pushed last.

    That of this thread, else of another, ended threads first: a generator with an open
    context may be finished, or garbage-collected, in another thread than it was started
    in. None if there is no open one.
    """
    for entry in reversed(_thread_state().stack):
        if entry.owner is owner:
            return entry
    others = [e for e in list(_open) if e.owner is owner and not e.is_closed]
    others.sort(key=lambda entry: not entry.state.thread.is_alive())
    return others[-1] if others else None


def _update_innermost(state: _ThreadState) -> None:
    """Find the innermost entries, and include our key if one has a policy."""
    state.innermost = dict(zip(map(_DEVICE, state.stack), state.stack, strict=True))
    contexts = [*map(_CONTEXT, state.innermost.values())]
    included = contexts.count(None) < len(contexts)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not included)  # noqa: SLF001


def active(device: str) -> CastContext | None:
    """Return the context that applies to operations of this thread now, or None."""
    entry = _thread_state().innermost.get(device)
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    return entry.context if entry and entry.graph_task == graph_task else None


def active_contexts() -> list[tuple[str, CastContext]]:
    """Return (device, active context) for each device on which a policy casts now."""
    state = _thread.state
    if state.popped_elsewhere:
        _thread_state()
    graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
    contexts = []
    for device, entry in state.innermost.items():
        if (
            entry.context is not None
            and entry.graph_task == graph_task
            and torch.is_autocast_enabled(device)
        ):
            contexts.append((device, entry.context))
    return contexts

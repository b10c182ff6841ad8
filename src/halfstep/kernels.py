"""Python kernels at torch's autocast keys, for the operations that a policy steers.

In: a device and operations. Out: torch's dispatcher asks the frame in force how each
of them runs, wherever it is called: in C++ composites, in other threads, in a
recomputation. Where no frame is in force torch's own kernel runs, as if ours were not.

Such a kernel serves the whole process, and costs some microseconds a call; operations
that no policy steers keep torch's alone. Where autocast is off none of them is reached.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.library import Library

from halfstep import gate, optable
from halfstep.errors import UserError
from halfstep.gate import Frame, Row
from halfstep.policy import KEEP, cast_to
from halfstep.untraced import untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.cast_cache import CastCache

Call: TypeAlias = "Callable[..., Any]"

KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
}
"""Device type -> the dispatch key at which torch casts."""

_WITH_DTYPE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm.Scalar": ("norm.ScalarOpt_dtype", (2,)),
    "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (False,)),
}
"""Reductions without a dtype argument -> the overload that has one, and the last
arguments where they are left out, for it has no defaults."""

_WIDE_WEIGHTS = {("cpu", "layer_norm"), ("cpu", "native_layer_norm")}
"""Device, operation -> torch's kernel takes 16-bit data beside weights of fp32, from
the third argument on: casting those costs time, and digits of the result."""

_one_at_a_time = threading.RLock()
"""torch's kernels hold the lock of its cache while they cast weights. A mode in Python
then waits for the interpreter, which another thread that waits for that lock inside a
call of ours would not give up. So that one waits for this lock first."""

_lock = threading.Lock()
_installed: dict[tuple[str, str], Library] = {}
_torchs: dict[tuple[str, str], Call] = {}
_behind: dict[tuple[str, str], Call] = {}
"""Kernels of a user's operators that are ours too: before torch 2.9 nobody could call
a kernel that stands behind another, so these are kept to be called."""
_ready: dict[tuple[str, int], Mapping[str, Row]] = {}
"""Device, identity -> rows that all have a kernel: regions ask at each entry."""


def install(device: str, names: Iterable[str]) -> None:
    """Let the dispatcher ask us about operations on a device, from now on.

    Args:
        device: "cpu", "cuda", "mps" or "xpu".
        names: aten's ("softmax.int") or other libraries' ("ns::name"); or rows that
            never change.
    """
    if _ready.get((device, id(names))) is names:
        return
    with _lock:
        for name in names:
            if (device, name) not in _installed:
                _installed[device, name] = _register(device, name)
        if isinstance(names, Mapping):
            _ready[device, id(names)] = names


def step_aside(name: str) -> list[str]:
    """Withdraw our kernels for an operation, so that another may be put behind them.

    Returns:
        The devices for which to `install` it again.
    """
    with _lock:
        _ready.clear()
        devices = [device for device, known in _installed if known == name]
        for device in devices:
            _installed.pop((device, name))._destroy()  # type: ignore[no-untyped-call] # noqa: SLF001
        for device in KEYS:
            _torchs.pop((device, name), None)
    return devices


def stand_behind(device: str, name: str, kernel: Call) -> None:
    """Take note of a kernel that runs where no policy has a say.

    Args:
        device: "cpu", "cuda", "mps" or "xpu".
        name: As `install` takes it.
        kernel: Registered at the device's autocast key.
    """
    _behind[device, name] = kernel


class Everywhere:
    """While open, kernels for operations that need one only while observed."""

    def __init__(self, device: str, names: Iterable[str]) -> None:
        self._device = device
        self._names = tuple(names)
        self._libraries: list[Library] = []

    def __enter__(self) -> None:
        with _lock:
            missing = [n for n in self._names if (self._device, n) not in _installed]
            self._libraries = [_register(self._device, name) for name in missing]

    def __exit__(self, *_: object) -> None:
        with _lock:
            for library in self._libraries:
                library._destroy()  # type: ignore[no-untyped-call] # noqa: SLF001 -- the one way back
            self._libraries = []


def overload_of(name: str) -> torch._ops.OpOverload:
    """Return the operation that a name means."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    found: torch._ops.OpOverload = getattr(
        getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default"
    )
    return found


def _register(device: str, name: str) -> Library:
    """Put a kernel of ours in front of torch's."""
    op = overload_of(name)
    key = KEYS[device]
    if (device, name) not in _torchs:
        _torchs[device, name] = _torchs_own(device, name, op)
    torchs = _torchs[device, name]
    run = runner(device, name, op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        frame = gate.in_force(device)
        row = frame.plan.get(name) if frame is not None else None
        if frame is None or row is None:
            return torchs(keyset, *args, **kwargs)
        if row.rule is not None:
            frame.matched.add(row.rule)
        if frame.recorder is not None and not frame.closed:
            if row.stock:
                chosen = partial(torchs, keyset, *args, **kwargs)
            else:
                chosen = partial(run, frame, row, args, kwargs)
            return frame.recorder.observe(name, frame, chosen, (args, kwargs))
        if row.stock:
            return torchs(keyset, *args, **kwargs)
        return run(frame, row, args, kwargs)

    library = Library(op.namespace, "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # Overriding torch's own kernel is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        spelt = name.rpartition("::")[2]
        # Not `library.impl`: torch 2.6 refuses there to override a kernel in Python,
        # which its dispatcher can do.
        registrar: Any = library.m
        registrar.impl(spelt, key, _passed_over(kernel), True)  # noqa: FBT003 -- with the keyset
    return library


def _passed_over(kernel: Call) -> Call:
    """Keep torch.compile from compiling a function of ours, and what that calls.

    Why: what it leaves to eager code calls our kernels, and it would try them next.
    """
    frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001
    if not hasattr(frames, "set_code_exec_strategy"):
        # torch 2.6 cannot mark the code: this costs a call more.
        return untraced(kernel)
    skip = frames._FrameAction.SKIP  # noqa: SLF001
    strategy = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001
    frames.set_code_exec_strategy(kernel.__code__, strategy)
    return kernel


def _torchs_own(device: str, name: str, op: torch._ops.OpOverload) -> Call:
    """Return what torch does with an operation at the key, before we stand there."""
    key = KEYS[device]
    full = name if "::" in name else f"aten::{name}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(full, key):  # noqa: SLF001
        return passing_on(op, key)
    if hasattr(torch.library, "get_kernel"):
        own: Call = torch.library.get_kernel(full, key).call_boxed
        casts = optable.TABLES[device].get(name)
        return _in_turn(own) if casts and casts.category == optable.LOW else own
    if (device, name) in _behind:
        return _without_keyset(_behind[device, name])
    if "::" in name:
        message = (
            f"op '{name}' has an autocast kernel of its own, which a rule would hide "
            f"for good in torch {torch.__version__}: take out the rule, or use torch "
            "2.9 or later."
        )
        raise UserError(message)
    run = runner(device, name, op)
    known = optable.TABLES[device].get(name)
    row = Row(known.category if known else KEEP, None, stock=True)

    def as_torch(_: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # torch's cache is out of reach, too; that of a region of ours is not.
        return run(gate.in_force(device), row, args, kwargs)

    return as_torch


def _without_keyset(kernel: Call) -> Call:
    def call(_: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return kernel(*args, **kwargs)

    return call


def _in_turn(own: Call) -> Call:
    def call(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _one_at_a_time:
            return own(keyset, *args, **kwargs)

    return call


def passing_on(op: torch._ops.OpOverload, key: str) -> Call:
    """Return the function that hands an operation on to the keys below one of ours.

    What it calls inside is still cast, unlike under `runner`.
    """
    own = DispatchKey.__members__[key]
    below = torch._C._dispatch_keyset_full_after(own)  # noqa: SLF001
    excluded = DispatchKeySet(own)
    written = {a.name for a in op._schema.arguments if a.alias_info is not None}  # noqa: SLF001
    may_be_number = [
        place
        for place, argument in enumerate(op._schema.arguments)  # noqa: SLF001
        if str(argument.type) == "Tensor" and argument.name not in written
    ]
    redispatch = op._handle.redispatch_boxed  # noqa: SLF001 -- spares a call

    def pass_on(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        for place in may_be_number:
            if place < len(args) and not isinstance(args[place], Tensor):
                # `x.add_(1)`: only a call from the top takes a number for a tensor.
                with torch._C._ExcludeDispatchKeyGuard(excluded):  # noqa: SLF001
                    return op(*args, **kwargs)
        return redispatch(keyset & below, *args, **kwargs)

    return pass_on


def runner(device: str, name: str, op: torch._ops.OpOverload) -> Call:
    """Return the function that casts an operation's operands and runs it.

    It takes a frame (None: no cache), a row, positional and keyword arguments.
    """
    excluded = DispatchKeySet(DispatchKey.__members__[KEYS[device]])
    wide_name, last = _WITH_DTYPE.get(name, (name, ()))
    wide = overload_of(wide_name)
    needed = len(wide._schema.arguments) - 1 if last else 0  # noqa: SLF001
    on: On = attrgetter(f"is_{device}")
    leave = (device, name) in _WIDE_WEIGHTS

    def run(
        frame: Frame | None, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        # As in torch: what an operation calls inside is not cast again.
        with torch._C._ExcludeDispatchKeyGuard(excluded):  # noqa: SLF001
            if row.category == KEEP:
                return op(*args, **kwargs)
            if row.category == optable.BANNED:
                raise RuntimeError(_banned(name, frame, row))
            if row.category == optable.FP32_RESULT:
                if not _eligible(args[0], on) or _has_dtype(op, args, kwargs):
                    return op(*args, **kwargs)
                args = args + last if len(args) < needed else args
                return wide(*args, **kwargs, dtype=torch.float32)
            low = torch.get_autocast_dtype(device)
            if row.category in _BY_OPERANDS:
                found = _floating((*args, *kwargs.values()), on)
                dtypes = [tensor.dtype for tensor in found]
            else:
                dtypes = _ANY
            dtype = cast_to(row.category, dtypes, low)
            if dtype is None:
                return op(*args, **kwargs)
            cache = None
            if frame is not None and not frame.closed and dtype is low:
                cache = frame.cache
            kept = leave and row.rule is None and dtype is low and _fp32(args[2:4])
            data = args[:2] if kept else args
            cast = *_cast(data, dtype, on, cache), *args[len(data) :]
            if not kwargs:
                return op(*cast)
            named = _cast(kwargs.values(), dtype, on, cache)
            return op(*cast, **dict(zip(kwargs, named, strict=True)))

    return run


_ELIGIBLE = frozenset((torch.float32, torch.bfloat16, torch.float16))
_ANY = [torch.float32]
"""Stands for operands whose dtypes do not matter to a category."""
_BY_OPERANDS = frozenset((optable.PROMOTE, optable.FOLLOW))

On: TypeAlias = "Callable[[Tensor], bool]"
"""Says whether a tensor is on the device."""


def _fp32(weights: Sequence[Tensor | None]) -> bool:
    """Say whether a weight, and a bias if there is one, are of fp32.

    Of a bias alone torch's kernel expects the format of the data.
    """
    if not weights or weights[0] is None:
        return False
    return all(w is None or w.dtype is torch.float32 for w in weights)


def _eligible(value: object, on: On) -> bool:
    """Say whether torch would cast a value at the device's key."""
    return isinstance(value, Tensor) and value.dtype in _ELIGIBLE and on(value)


def _floating(values: Iterable[Any], on: On) -> list[Tensor]:
    """Return the floating tensors of arguments, fp64 included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and on(value):
                found.append(value)
        elif isinstance(value, list | tuple):
            found += _floating(value, on)
    return found


def _cast(
    values: Iterable[Any], dtype: torch.dtype, on: On, cache: CastCache | None
) -> list[Any]:
    """Return arguments with their eligible tensors in a dtype."""
    made: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is not dtype and value.dtype in _ELIGIBLE and on(value):
                made.append(value.to(dtype) if cache is None else cache(value, dtype))
                continue
        elif isinstance(value, list | tuple):
            made.append(_cast(value, dtype, on, cache))
            continue
        made.append(value)
    return made


def _has_dtype(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Say whether the caller has asked for a dtype himself."""
    if kwargs.get("dtype") is not None:
        return True
    names = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
    place = names.index("dtype") if "dtype" in names else len(args)
    return place < len(args) and args[place] is not None


def _banned(name: str, frame: Frame | None, row: Row) -> str:
    if frame is None or row.rule is None:
        return f"{name} is unsafe in 16 bits: torch's table bans it."
    return (
        f"{name} is banned by the rule '{frame.policy.rules[row.rule]}'. Use another "
        "operation there, or take the rule out of the policy."
    )

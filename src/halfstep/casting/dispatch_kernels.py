"""Python kernels that cast the operands of operations as the active policy says.

Inside a context with a policy, torch's dispatcher calls them wherever the operation is
called: in C++ composites, in other threads that the context was passed to, and in
recomputed segments.

They are registered at a dispatch key of their own that precedes torch's autocast keys.
A thread includes it only while it has such a context (`active_context.push`), so plain
`torch.autocast` and other threads have no overhead. No kernel calls torch's cast or
takes its lock; operations that a policy leaves to torch are redispatched, and the
dispatcher releases the GIL first.
"""

from __future__ import annotations

import re
import threading
import warnings
from functools import cache, partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.library import Library

from halfstep._torch.dynamo import dynamo_disable
from halfstep.casting import active_context
from halfstep.numerics.formats import AUTOCAST_DTYPES
from halfstep.policy import op_tables
from halfstep.policy.decision import cast_to
from halfstep.policy.rules import KEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from halfstep.casting.active_context import CastContext, OpCast
    from halfstep.casting.weight_cache import CastCache

Call: TypeAlias = "Callable[..., Any]"

KEYS = {device: f"Autocast{device.upper()}" for device in op_tables.TABLES}
"""Device type -> torch's autocast dispatch key."""
_KEY_NAME = active_context.KEY.name
"""The dispatch key of these kernels."""

_DEVICE_ORDER = ("cuda", "mps", "xpu", "cpu")
"""Device types in the order in which the dispatcher visits their autocast keys."""

_WITH_DTYPE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm.Scalar": ("norm.ScalarOpt_dtype", (2,)),
    "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (False,)),
}
"""Reduction without a dtype argument -> (the overload that has one, values of its last
arguments, which have no defaults there)."""

_lock = threading.Lock()
_installed: dict[str, Library] = {}
"""Operation -> Library with its kernel."""


def install(names: Iterable[str]) -> None:
    """Register kernels for operations, once per process.

    Args:
        names: Names of aten ("softmax.int") or of other libraries ("ns::name").
    """
    with _lock:
        for name in names:
            if name not in _installed:
                _installed[name] = _register(name)


def overload_of(name: str) -> torch._ops.OpOverload:
    """Return the operation with a name; without overload, the default one."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    op: torch._ops.OpOverload = getattr(
        getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default"
    )
    return op


def _register(name: str) -> Library:
    """Register a kernel for an operation at our key."""
    op = overload_of(name)
    redispatch = make_redispatch(op)
    takes_tensor = _tensor_arguments(op, numbers=False)
    has_lists = re.search(r"Tensor\??\[", str(op._schema)) is not None  # noqa: SLF001
    cast_calls = {device: make_cast_and_call(device, name, op) for device in KEYS}

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if has_lists or not _NUMBERS.isdisjoint(
            map(type, compress(args, takes_tensor))
        ):
            args = tuple(map(_with_tensors, args, takes_tensor))
        contexts = active_context.active_contexts()
        if len(contexts) > 1:
            contexts = _contexts_of(args, contexts)
        if not contexts:
            return redispatch(keyset, *args, **kwargs)
        device, context = contexts[0]
        op_cast = context.op_casts.get(name)
        if op_cast is None or (
            op_cast.rule_index is not None
            and not _is_any_on((*args, *kwargs.values()), device)
        ):
            return redispatch(keyset, *args, **kwargs)
        if op_cast.rule_index is not None:
            context.matched_rules.add(op_cast.rule_index)
        if context.observe is not None:
            if op_cast.is_torch_default:
                call = partial(redispatch, keyset, *args, **kwargs)
            else:
                call = partial(cast_calls[device], context, op_cast, args, kwargs)
            return context.observe(name, context, call, (args, kwargs))
        if op_cast.is_torch_default:
            return redispatch(keyset, *args, **kwargs)
        return cast_calls[device](context, op_cast, args, kwargs)

    library = Library(op.namespace, "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns if ours replaces a kernel that it has registered at the key.
        warnings.simplefilter("ignore", UserWarning)
        op_name = name.rpartition("::")[2]
        registrar: Any = library.m
        registrar.impl(op_name, _KEY_NAME, dynamo_disable(kernel), True)  # noqa: FBT003 -- with the keyset
    return library


def _contexts_of(
    args: tuple[Any, ...], contexts: list[tuple[str, CastContext]]
) -> list[tuple[str, CastContext]]:
    """Return the contexts of the operands' devices, highest dispatch key first."""
    matching = [each for each in contexts if _is_any_on(args, each[0])]
    return sorted(matching, key=lambda each: _DEVICE_ORDER.index(each[0]))


def _is_any_on(values: Iterable[Any], device: str) -> bool:
    """Return whether any tensor among arguments is on a device."""
    return any(
        value.device.type == device
        if isinstance(value, Tensor)
        else isinstance(value, list | tuple) and _is_any_on(value, device)
        for value in values
    )


def make_redispatch(op: torch._ops.OpOverload) -> Call:
    """Return a function that redispatches an operation to the keys below ours.

    Operations called inside are still cast, unlike with `make_cast_and_call`.
    """
    below = torch._C._dispatch_keyset_full_after(active_context.KEY)  # noqa: SLF001
    excluded = DispatchKeySet(active_context.KEY)
    takes_tensor = _tensor_arguments(op, numbers=True)
    redispatch = op._handle.redispatch_boxed  # noqa: SLF001 -- spares a call

    def run_below(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not _NUMBERS.isdisjoint(map(type, compress(args, takes_tensor))):
            # `x.add_(1)`: a call accepts a number for a tensor, redispatch does not.
            with torch._C._ExcludeDispatchKeyGuard(excluded):  # noqa: SLF001
                return op(*args, **kwargs)
        return redispatch(keyset & below, *args, **kwargs)

    return run_below


_NUMBERS = frozenset((float, int, bool, complex))
_PLAIN = DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView)
"""The dispatch keys that a thread includes outside of all contexts and modes."""
_NO_KEYS = _PLAIN - _PLAIN


def _tensor_arguments(op: torch._ops.OpOverload, *, numbers: bool) -> tuple[bool, ...]:
    """Return for each argument whether it is a tensor.

    Returns () unless the operation's acceptance of numbers as tensors is `numbers`.
    """
    name = op._schema.name.rpartition("::")[2]  # noqa: SLF001
    if torch._C._should_allow_numbers_as_tensors(name) != numbers:  # noqa: SLF001
        return ()
    return tuple("Tensor" in str(argument.type) for argument in op._schema.arguments)  # noqa: SLF001


def _with_tensors(value: Any, is_tensor: bool) -> Any:  # noqa: ANN401
    """Return an argument with wrapped-number tensors in place of Python numbers.

    torch passes a wrapped-number tensor, such as the one that `x * 2.5` saves, to
    Python kernels as a number, which most operations then reject. Wrapped numbers rank
    lower in type promotion, and only torch can create them: here, by a multiplication.
    """
    if not is_tensor:
        return value
    if isinstance(value, list | tuple):
        return [_with_tensors(part, is_tensor) for part in value]
    if type(value) not in _NUMBERS:
        return value
    guard = torch._C._ForceDispatchKeyGuard(_PLAIN, _NO_KEYS)  # noqa: SLF001
    with guard, torch.inference_mode(mode=False), torch.enable_grad():
        one = torch.ones((), device="cpu", requires_grad=True)
        node: Any = torch.mul(one, value).grad_fn
        return node._saved_other  # noqa: SLF001


def make_cast_and_call(device: str, name: str, op: torch._ops.OpOverload) -> Call:
    """Return a function that casts an operation's operands and runs it.

    Its arguments: context, `OpCast`, positional and keyword arguments.
    """
    excluded = DispatchKeySet(DispatchKey.__members__[KEYS[device]]).add(
        active_context.KEY
    )
    fp32_name, extra_args = _WITH_DTYPE.get(name, (name, ()))
    fp32_op = overload_of(fp32_name)
    num_args = len(fp32_op._schema.arguments) - 1 if extra_args else 0  # noqa: SLF001
    is_on_device: IsOnDevice = attrgetter(f"is_{device}")
    fp32_args = op_tables.fp32_arguments(name, device)
    call = op._op  # noqa: SLF001 -- spares a call

    def run(
        context: CastContext,
        op_cast: OpCast,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        # As in torch: operations called inside are not cast again.
        with torch._C._ExcludeDispatchKeyGuard(excluded):  # noqa: SLF001
            # Fast path: after a large matmul, little of this code is in CPU caches.
            is_plain_low = op_cast.category == op_tables.LOW and not (
                fp32_args or kwargs
            )
            if is_plain_low or op_cast.category == KEEP:
                low_dtype = torch.get_autocast_dtype(device)
                operands = (
                    _cast(args, low_dtype, is_on_device, context.cache)
                    if is_plain_low
                    else args
                )
                return call(*operands, **kwargs)
            if op_cast.category == op_tables.BANNED:
                raise RuntimeError(_banned_message(name, context, op_cast))
            if op_cast.category == op_tables.FP32_RESULT:
                if not _is_eligible(args[0], is_on_device) or _has_dtype(
                    op, args, kwargs
                ):
                    return op(*args, **kwargs)
                args = args + extra_args if len(args) < num_args else args
                return fp32_op(*args, **kwargs, dtype=torch.float32)
            low_dtype = torch.get_autocast_dtype(device)
            if op_cast.category in _BY_OPERANDS:
                floating = _floating((*args, *kwargs.values()), is_on_device)
                dtypes = tuple(map(_DTYPE, floating))
            else:
                dtypes = _ANY_DTYPE
            dtype = _cast_to(op_cast.category, dtypes, low_dtype)
            if dtype is None:
                return op(*args, **kwargs)
            cache = context.cache if dtype is low_dtype else None
            if fp32_args and dtype is low_dtype:
                cast_args = _cast_data(args, dtype, is_on_device, cache, fp32_args)
            else:
                cast_args = _cast(args, dtype, is_on_device, cache)
            if not kwargs:
                return op(*cast_args)
            cast_kwargs = _cast(kwargs.values(), dtype, is_on_device, cache)
            return op(*cast_args, **dict(zip(kwargs, cast_kwargs, strict=True)))

    return run


_DTYPE = attrgetter("dtype")
_cast_to = cache(cast_to)
_ANY_DTYPE = (torch.float32,)
"""Operand dtypes for categories that do not depend on them."""
_BY_OPERANDS = frozenset((op_tables.PROMOTE, op_tables.FOLLOW))

IsOnDevice: TypeAlias = "Callable[[Tensor], bool]"
"""Returns whether a tensor is on the device."""


def _cast_data(
    args: tuple[Any, ...],
    dtype: torch.dtype,
    is_on_device: IsOnDevice,
    cache: CastCache | None,
    fp32_args: tuple[int, ...],
) -> list[Any]:
    """Return arguments cast to 16 bits, but for those of `op_tables.fp32_arguments`.

    A bias without a weight is cast: torch's kernel expects it in the data's dtype. So
    are weights of which not all are fp32. Running statistics, which come after weight
    and bias, are never cast, since an update of the cast would be lost.
    """
    weights = [args[index] for index in fp32_args[:2] if index < len(args)]
    is_fp32 = [w is None or w.dtype is torch.float32 for w in weights]
    keeps_weights = weights and weights[0] is not None and all(is_fp32)
    operands: list[Any] = [*args]
    keep = [i for i in fp32_args[0 if keeps_weights else 2 :] if i < len(args)]
    for index in keep:
        operands[index] = None
    operands = _cast(operands, dtype, is_on_device, cache)
    for index in keep:
        operands[index] = args[index]
    return operands


def _is_eligible(value: object, is_on_device: IsOnDevice) -> bool:
    """Return whether torch would cast a value at the device's autocast key."""
    return (
        isinstance(value, Tensor)
        and value.dtype in AUTOCAST_DTYPES
        and is_on_device(value)
    )


def _floating(values: Iterable[Any], is_on_device: IsOnDevice) -> list[Tensor]:
    """Return the floating tensors of arguments, fp64 included."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and is_on_device(value):
                tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _floating(value, is_on_device)
    return tensors


def _cast(
    values: Iterable[Any],
    dtype: torch.dtype,
    is_on_device: IsOnDevice,
    cache: CastCache | None,
) -> list[Any]:
    """Return arguments with their eligible tensors cast to a dtype."""
    cast_values: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if (
                value.dtype is not dtype
                and value.dtype in AUTOCAST_DTYPES
                and is_on_device(value)
            ):
                cast_values.append(
                    value.to(dtype) if cache is None else cache(value, dtype)
                )
                continue
        elif isinstance(value, list | tuple):
            cast_values.append(_cast(value, dtype, is_on_device, cache))
            continue
        cast_values.append(value)
    return cast_values


def _has_dtype(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether the caller has passed `dtype`."""
    if kwargs.get("dtype") is not None:
        return True
    names = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
    index = names.index("dtype") if "dtype" in names else len(args)
    return index < len(args) and args[index] is not None


def _banned_message(name: str, context: CastContext, op_cast: OpCast) -> str:
    if op_cast.rule_index is None:
        return f"{name} is unsafe in 16 bits: torch's table bans it."
    return (
        f"{name} is banned by the rule '{context.policy.rules[op_cast.rule_index]}'. "
        "Use another operation there, or take the rule out of the policy."
    )

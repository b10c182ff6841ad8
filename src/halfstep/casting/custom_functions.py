"""Decorators that make custom functions and operators follow autocast.

`custom_fwd` and `custom_bwd` are for the methods of an autograd.Function,
`low_precision`, `full_precision` and `promote` for Python functions and operators.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _autocast_supported_devices,
    _dispatch_key_for_device,
    _ExcludeDispatchKeyGuard,
    _parse_dispatch_key,
)
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.amp.autocast_mode import custom_bwd as torch_custom_bwd
from torch.amp.autocast_mode import custom_fwd as torch_custom_fwd
from torch.library import Library

from halfstep.casting import active_context, recompute
from halfstep.errors import UserError
from halfstep.numerics.formats import cast_floating
from halfstep.policy import decision
from halfstep.policy.op_tables import FP32, LOW, PROMOTE

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_Operator: TypeAlias = (
    str | CustomOpDef | OpOverloadPacket[..., Any] | OpOverload[..., Any]
)

_REGISTERED: dict[str, Library] = {}
"""Operator -> Library with its casting kernels; they live as long as this object."""


# Methods of an autograd.Function


@dataclass
class _Box:
    """Stand-in for a ctx, or holder of a value that torch's decorator must not cast."""

    output: object = None
    """Output of forward."""
    recording: bool = False
    """Whether grad mode was on when `setup_context` was called."""


@overload
def custom_fwd(
    fwd: Callable[P, R], *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[P, R]: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str,
    cast_inputs: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorate `forward` of a `torch.autograd.Function` for use under autocast.

    A drop-in for `torch.amp.custom_fwd` that also works for a Function with a
    `setup_context`, where torch's takes the first tensor for the ctx and backward
    fails. Decorate `setup_context` with the same arguments as `forward`: it gets the
    inputs as forward saw them. Casts of inputs are recorded by autograd, so that second
    derivatives work.

    Args:
        fwd: The method. None returns the decorator.
        device_type: "cpu", "cuda", ...
        cast_inputs: Dtype to cast floating inputs on that device to, fp64 excepted,
            while autocast is on; `forward` then runs with autocast off. None, the
            default as in torch, leaves inputs and autocast as they are.

    Raises:
        ValueError: If `device_type` is not a string.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x.square()
        ...
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, gradient):
        ...         return 2 * ctx.saved_tensors[0] * gradient
        >>> with torch_autocast("cpu", torch.bfloat16):
        ...     Square.apply(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    arguments: Any = {"device_type": device_type, "cast_inputs": cast_inputs}
    decorate: Any = functools.partial(torch_custom_fwd, **arguments)
    classic = decorate(fwd)
    if fwd is None:
        return functools.partial(custom_fwd, **arguments)

    def without_ctx(_: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return fwd(*args, **kwargs)

    ctxless = decorate(without_ctx)

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # Duck-typed: tests of a forward may pass a stand-in for the ctx.
        if args and hasattr(args[0], "save_for_backward"):
            args[0]._restored_policy = recompute.capture()  # noqa: SLF001
            return classic(*args, **kwargs)
        return ctxless(_Box(), *args, **kwargs)

    def unboxed(ctx: object, inputs: object, box: _Box) -> Any:  # noqa: ANN401
        with torch.set_grad_enabled(box.recording):
            return fwd(ctx, inputs, box.output)

    boxed = decorate(unboxed)

    def setup_context(ctx: Any, inputs: object, output: object) -> Any:  # noqa: ANN401
        # Boxed, since torch's decorator casts all arguments and output must stay.
        box = _Box(output, recording=torch.is_grad_enabled())
        ctx._restored_policy = recompute.capture()  # noqa: SLF001
        with torch.enable_grad():
            return boxed(ctx, inputs, box)

    is_setup = getattr(fwd, "__name__", "") == "setup_context"
    return functools.wraps(fwd)(setup_context if is_setup else forward)


@overload
def custom_bwd(bwd: Callable[P, R], *, device_type: str) -> Callable[P, R]: ...
@overload
def custom_bwd(
    bwd: None = None, *, device_type: str
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def custom_bwd(
    bwd: Callable[..., Any] | None = None, *, device_type: str
) -> Callable[..., Any]:
    """Decorate `backward` of a Function: it runs with the autocast state of `forward`.

    Args:
        bwd: The method. None returns the decorator.
        device_type: The same as for `custom_fwd`, which has an example.

    Raises:
        ValueError: If `device_type` is not a string.
        RuntimeError: When backward runs, if `setup_context` was not decorated.
    """
    classic = torch_custom_bwd(bwd, device_type=device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if args:
            _check_marked(args[0])
        restored = getattr(args[0] if args else None, "_restored_policy", None)
        with contextlib.nullcontext() if restored is None else restored():
            return classic(*args, **kwargs)

    return backward


def _check_marked(ctx: object) -> None:
    """Raise if `setup_context` was not decorated; torch checks only `forward(ctx)`."""
    if hasattr(ctx, "_fwd_used_autocast"):
        return
    function = getattr(ctx, "_forward_cls", torch.autograd.Function)
    if function.setup_context is not torch.autograd.Function.setup_context:
        name = function.__name__
        raise RuntimeError(
            f"{name}.backward does not know the autocast state of forward: decorate "
            f"{name}.setup_context with @custom_fwd, as {name}.forward is."
        )


# Functions and operators


def low_precision(target: T) -> T:
    """Run a function, or a custom operator, in autocast's 16-bit dtype.

    A function: while autocast is on for the device of a floating tensor in the
    arguments, also in nested containers, each such tensor is cast and the function
    runs with autocast off. Without autocast it is called as it is. Float64, integer,
    bool and complex tensors are not cast, nor are tensors that are not arguments: cast
    `self.weight` yourself. A list or mapping with tensors to cast is passed as a copy.

    An operator: the same, registered for all its overloads and device types, in the
    whole process; a later call replaces it. Overloads that write into an argument or
    return a view of one are not cast, since a copy would break both. Unlike
    `torch.library.register_autocast`, the dtype is that of the active context, and
    keyword arguments work.

    Args:
        target: A function, method, staticmethod or classmethod; or an operator:
            `torch.ops.ns.name`, an overload of it, the result of
            `@torch.library.custom_op`, or "ns::name".

    Returns:
        The wrapped function; an operator is returned as it was given.

    Raises:
        UserError: If it is neither, or the operator is torch's own, is not registered
            or has no overload that can be cast.

    Example:
        >>> @low_precision
        ... def scores(query, key):
        ...     return query @ key.T
        >>> with torch_autocast("cpu", torch.bfloat16):
        ...     scores(torch.ones(2, 4), torch.ones(3, 4)).dtype
        torch.bfloat16
    """
    return _apply_category(target, LOW)


def full_precision(target: T) -> T:
    """Run a function, or a custom operator, in fp32 under autocast.

    Args, return value and exceptions are those of `low_precision`.

    Example:
        >>> @full_precision
        ... def normalize(x):
        ...     return x / x.norm()
        >>> with torch_autocast("cpu", torch.bfloat16):
        ...     normalize(torch.ones(4, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return _apply_category(target, FP32)


def promote(target: T) -> T:
    """Run a function, or a custom operator, in the widest dtype of its operands.

    Most kernels reject operands of several dtypes. A mix of bf16 and fp16 runs in fp32,
    which holds both, and so does the 16-bit dtype that is not autocast's. Args, return
    value and exceptions are those of `low_precision`.

    Example:
        >>> @promote
        ... def gate(x, y):
        ...     return x * y
        >>> with torch_autocast("cpu", torch.bfloat16):
        ...     gate(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return _apply_category(target, PROMOTE)


def _apply_category(target: T, category: str) -> T:
    if isinstance(target, str | OpOverload | OpOverloadPacket | CustomOpDef):
        _register(_overloads(target), category)
        return target
    if isinstance(target, staticmethod | classmethod):
        return cast("T", type(target)(_wrap(target.__func__, category)))
    if not callable(target) or isinstance(target, type | nn.Module):
        target_type = target if isinstance(target, type) else type(target)
        raise UserError(
            f"{target_type.__name__} is neither a function nor an operator: decorate "
            "the forward of a module, or name an operator as 'namespace::name'."
        )
    return cast("T", _wrap(target, category))


def _wrap(function: Callable[P, R], category: str) -> Callable[P, R]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        wrapped: Callable[..., R] = function
        for device in sorted({t.device.type for t in _floating((args, kwargs))}):
            available = torch.amp.is_autocast_available(device)
            if available and torch.is_autocast_enabled(device):
                args, kwargs = _cast(args, kwargs, category, device)
                wrapped = torch_autocast(device, enabled=False)(wrapped)
        return wrapped(*args, **kwargs)

    return run


def _overloads(target: _Operator) -> list[OpOverload[..., Any]]:
    if isinstance(target, OpOverload):
        return [target]
    if isinstance(target, CustomOpDef):
        target = target._qualname  # noqa: SLF001 -- torch has no other name for it
    if isinstance(target, str):
        namespace, _, name = target.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if not isinstance(packet, OpOverloadPacket):
            raise UserError(
                f"op {target!r} is not registered: import what registers it, and write "
                "its name as 'namespace::name'."
            )
        target = packet
    names: list[str] = target.overloads()  # type: ignore[no-untyped-call]
    return [getattr(target, name) for name in names]


def _register(overloads: list[OpOverload[..., Any]], category: str) -> None:
    """Register casting kernels at the autocast keys of all device types."""
    name = overloads[0]._schema.name  # noqa: SLF001 -- the name without overload
    namespace, _, short = name.partition("::")
    if namespace == "aten":
        raise UserError(
            f"op '{name}' is torch's own, not a custom operator: use a policy rule: "
            f"'op:{short}={category}'."
        )
    castable = [  # others write into an argument, or return a view of one
        each
        for each in overloads
        if all(argument.alias_info is None for argument in each._schema.arguments)  # noqa: SLF001
    ]
    if not castable:
        raise UserError(
            f"op '{name}' writes into an argument or returns a view of one, which a "
            "cast copy would break: register an operator that returns a new tensor."
        )
    for operator in castable:
        # Remove the old kernels first: torch warns if a kernel replaces another.
        _REGISTERED.pop(str(operator), None)
        library = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        for device in _autocast_supported_devices():
            if device == active_context.NO_BACKEND:  # policies use the key of that one
                continue
            key = f"Autocast{_dispatch_key_for_device(device)}"
            kernel = _kernel(operator, category, device, key)
            library.impl(operator, kernel, key)  # type: ignore[no-untyped-call]
        _REGISTERED[str(operator)] = library


def _kernel(
    operator: OpOverload[..., Any], category: str, device: str, key: str
) -> Callable[..., Any]:
    keys = DispatchKeySet(cast("DispatchKey", _parse_dispatch_key(key)))

    def kernel(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        args, kwargs = _cast(args, kwargs, category, device)
        with _ExcludeDispatchKeyGuard(keys):
            return operator(*args, **kwargs)

    return kernel


# Nested values


def _cast(
    args: tuple[Any, ...], kwargs: dict[str, Any], category: str, device: str
) -> tuple[Any, Any]:
    """Return arguments with the floating tensors on a device cast for a category."""
    floating = _floating((args, kwargs))
    dtypes = [tensor.dtype for tensor in floating if tensor.device.type == device]
    dtype = decision.cast_to(category, dtypes, torch.get_autocast_dtype(device))
    if dtype is None or set(dtypes) == {dtype}:
        return args, kwargs
    return cast("tuple[Any, Any]", _cast_on((args, kwargs), device, dtype))


def _floating(value: object) -> list[Tensor]:
    """Return the floating tensors in a nested value."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, MutableMapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _floating(item)]
    return []


def _cast_on(value: Any, device: str, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return `value` with the floating tensors on a device in `dtype`.

    Containers without floating tensors are not copied, since a function may write into
    them; nor are dataclasses, which may be the `self` of a method.
    """
    if isinstance(value, Tensor):
        return cast_floating(value, dtype) if value.device.type == device else value
    if not _floating(value):
        return value
    if isinstance(value, list | tuple):
        items = [_cast_on(item, device, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    copied = copy.copy(value)
    # One by one: transformers' ModelOutput raises on `update`.
    for key, item in value.items():
        copied[key] = _cast_on(item, device, dtype)
    return copied

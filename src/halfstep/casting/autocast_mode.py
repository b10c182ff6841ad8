"""`autocast`: a drop-in for `torch.autocast` with policies, caches and reports."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.amp.autocast_mode import autocast as torch_autocast

from halfstep._torch.dynamo import dynamo_disable
from halfstep._torch.patches import SharedPatches
from halfstep.casting import (
    active_context,
    compile_guard,
    data_parallel,
    dispatch_table,
    dtype_mismatch,
    module_rules,
    recompute,
    torch_cache,
)
from halfstep.casting.compile_region import traceable_autocast
from halfstep.casting.entered_contexts import PerThreadStack
from halfstep.casting.policy_autocast import PolicyAutocast
from halfstep.errors import UserError
from halfstep.policy.rules import TORCH, Policy

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from halfstep.casting.weight_cache import CastCache
    from halfstep.reporting.table import Table


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | os.PathLike[str] | None = None,
    model: torch.nn.Module | None = None,
    cache: CastCache | None = None,
    record: bool = False,
) -> Autocast | PolicyAutocast:
    """Return an autocast context: a drop-in for `torch.autocast` that takes a policy.

    It differs from `torch.autocast` in this: one instance may be entered several times
    at once, also by several threads; a nested context may have another dtype; a weight
    that is changed inside, by an optimizer or under `no_grad`, is cast again; replicas
    of `nn.DataParallel` use the dtype. Policy rules choose the dtype of operations and
    modules, and `report()` shows in which dtype each operation ran, and why.

    It sets torch's own autocast state: activation checkpointing, DDP, model code and
    third-party kernels that ask torch whether autocast is on get the right answer.

    Args:
        device_type: "cpu", "cuda", "mps", "xpu", or another with autocast in torch.
        dtype: The 16-bit dtype. Default: that of the enclosing context, else torch's
            default for the device (bf16 on CPUs, fp16 on CUDA).
        enabled: False turns casting off inside.
        cache_enabled: Keep the cast of a weight until the outermost context ends.
            Default: torch's current setting, which is True.
        policy: "torch", "lean", either with rules ("lean + op:softmax=fp32"), the path
            of a TOML file, or a `Policy`. None: that of the enclosing context, else
            "torch", so that the drop-in casts as `torch.autocast` does.
        model: The model that module and type rules of the policy refer to.
        cache: A `CastCache` that serves all casts of weights, across contexts. None:
            torch's cache, and a new one for operations whose rule differs from torch.
        record: Record each operation for `report()`. Off by default, since it is slow.

    Returns:
        A context manager and decorator, which may be used any number of times. If
        torch.compile traces one with a policy, make it where it is entered, or use it
        as a decorator.

    Raises:
        UserError: If a rule matches no operation or module, or there are module or
            type rules without `model`.

    Example:
        >>> weight, vector = torch.ones(2, 2), torch.ones(2)
        >>> with autocast("cpu", torch.bfloat16):
        ...     print((weight @ vector).dtype, vector.softmax(0).dtype)
        torch.bfloat16 torch.float32
        >>> with autocast("cpu", torch.bfloat16, policy="torch + op:matmul=fp32"):
        ...     print((weight @ vector).dtype)
        torch.float32
    """
    if torch.compiler.is_compiling():
        settings = (device_type, dtype, enabled, cache_enabled)
        modules = model is not None
        return traceable_autocast(settings, policy, record=record, modules=modules)  # type: ignore[return-value]
    context = Autocast(device_type, dtype, enabled, cache_enabled)
    chosen = None if policy is None else Policy.of(policy)
    if chosen in (None, TORCH) and cache is None and not record:
        context.policy = chosen
        return context
    dispatch_table.check_policy(chosen or TORCH, device_type, model)
    if chosen is not None and model is not None:
        module_rules.attach(model, chosen)
    return PolicyAutocast(
        context, chosen, cache, cache_weights=cache is not None, record=record
    )


_patches = SharedPatches(*torch_cache.PATCHES, *data_parallel.PATCHES)


class _Entry(NamedTuple):
    """One entry of a context, with the state to restore."""

    context: torch_autocast
    pushed: tuple[int, active_context.Pushed] | None
    entered: torch_cache.EnteredContext | None


class Autocast(torch_autocast):
    """An autocast context under torch's own table; `autocast` makes it."""

    policy: Policy | None = None
    """TORCH overrides the policy of an enclosing context; None inherits it."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None,
        enabled: bool,
        cache_enabled: bool | None,
    ) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self._settings = dict(vars(self))
        self._entries: PerThreadStack[_Entry] = PerThreadStack()

    @dynamo_disable
    def __enter__(self) -> Self:
        """Enter the context; it may be entered several times."""
        active_context.run_pending()
        # One torch context per entry: it stores the state to restore on itself.
        context = object.__new__(torch_autocast)
        vars(context).update(self._settings)
        context.__enter__()  # type: ignore[no-untyped-call]
        _patches.acquire()
        entered = pushed = None
        if self._enabled:
            entered = torch_cache.on_enter(self.device, self.fast_dtype)
        if self.policy is not None and active_context.active(self.device) is not None:
            pushed = (
                compile_guard.set_policy_guard(TORCH),
                recompute.push(self.device, None),
            )
        self._entries.push(_Entry(context, pushed, entered))
        return self

    @dynamo_disable
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:  # noqa: ANN401 -- torch's signature
        """Leave the context entered last, and restore the state before it.

        Raises:
            DtypeMismatch: In place of torch's error, with the operation and the rule
                that fixes it.
        """
        context, pushed, entered = self._entries.pop()
        if pushed is not None:
            guard, context_entry = pushed
            recompute.pop(
                context_entry, partial(compile_guard.restore_policy_guard, guard)
            )
        if entered is not None:
            torch_cache.on_exit(entered)
        _patches.release()
        context.__exit__(exc_type, exc_value, traceback)
        if exc_value is not None:
            mismatch = dtype_mismatch.explain(exc_value)
            if mismatch is not None:
                raise mismatch from exc_value
            dtype_mismatch.add_cure(exc_value)
        return False

    def report(self) -> Table:
        """Raise an error: without `record=True` nothing is recorded.

        Raises:
            UserError: Always.
        """
        message = (
            "this context recorded nothing, since recording is slow: open it as "
            "autocast(..., record=True) to have a report."
        )
        raise UserError(message)

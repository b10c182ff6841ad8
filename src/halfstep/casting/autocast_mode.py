"""`autocast`: a drop-in for `torch.autocast` with policies, caches and reports."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch.amp.autocast_mode import autocast as torch_autocast

from halfstep._torch.dynamo import dynamo_disable, dynamo_inline_only
from halfstep.casting import (
    active_context,
    dispatch_table,
    dtype_mismatch,
    module_rules,
    recompute,  # noqa: F401 -- adds its patches
)
from halfstep.casting.active_context import CastContext, Entry
from halfstep.casting.compile_region import traceable_autocast
from halfstep.casting.operation_record import OperationRecord, RecordingMode
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError, warn_caller
from halfstep.policy.rules import TORCH, Policy, context_history

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from halfstep.reporting.table import Table

P = ParamSpec("P")
R = TypeVar("R")


# torch 2.9 would compile it by itself, and cannot return what it returns.
@dynamo_inline_only
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
    that an optimizer, or an in-place method such as `copy_`, changes inside is cast
    again; replicas of `nn.DataParallel` use the dtype; Ctrl-C while a context is opened
    or closed rarely leaves it open. Policy rules choose the dtype of operations and
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
        return traceable_autocast(  # type: ignore[return-value]
            settings, policy, record=record, has_module_rules=model is not None
        )
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


class _Exit:
    """`__exit__` of both classes of contexts."""

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
        entry = None
        try:
            entry = active_context.entry_of(self)
            active_context.pop(entry)
        except BaseException:  # Ctrl-C
            active_context.pop(entry or active_context.entry_of(self))
            raise
        if entry is None:
            raise IndexError("a context was closed more often than it was opened")
        self._after_exit(entry, exc_value)
        return False

    def _after_exit(self, entry: Entry, error: BaseException | None) -> None:
        raise NotImplementedError


class Autocast(_Exit, torch_autocast):
    """An autocast context under torch's own table; `autocast` makes it."""

    policy: Policy | None = None
    """TORCH overrides the policy of an enclosing context; None inherits it."""

    @dynamo_disable
    def __enter__(self) -> Self:
        """Enter the context; it may be entered several times."""
        context = active_context.active(self.device)
        policy = self.policy if context else None
        if self.policy is not None:
            context = None
        active_context.push(
            self.device,
            context,
            policy,
            torch_context=self,
            uses_torch_cache=self._enabled,
            owner=self,
        )
        return self

    def _after_exit(self, _entry: Entry, error: BaseException | None) -> None:
        self.explain(error)

    def explain(self, error: BaseException | None) -> None:
        """Raise the `DtypeMismatch` that explains an error, or add a note to it."""
        if error is not None:
            if mismatch := dtype_mismatch.explain(error, enabled=self._enabled):
                raise mismatch from error
            dtype_mismatch.add_cure(error)

    def __call__(self, func: Any) -> Any:  # noqa: ANN401 -- torch's signature
        """Return a function that runs inside this context."""
        _warn_of_generator(func, enabled=self._enabled)
        return super().__call__(func)  # type: ignore[no-untyped-call]

    def report(self) -> Table:
        """Raise an error: without `record=True` nothing is recorded.

        Raises:
            UserError: Always.
        """
        raise _not_recorded()


def _warn_of_generator(function: object, *, enabled: bool) -> None:
    """Warn of a decorated function whose body runs after the context has ended."""
    is_coroutine = inspect.iscoroutinefunction(function)
    is_generator = inspect.isgeneratorfunction(function)
    is_async_generator = inspect.isasyncgenfunction(function)
    if enabled and (is_coroutine or is_generator or is_async_generator):
        name = getattr(function, "__name__", function)
        warn_caller(
            f"autocast has no effect in {name}, a generator or coroutine: its body "
            "runs after the decorated call. Write 'with autocast(...):' in the body."
        )


def _not_recorded() -> UserError:
    message = (
        "this context recorded nothing, since recording is slow: open it as "
        "autocast(..., record=True) to have a report."
    )
    return UserError(message)


class PolicyAutocast(_Exit):
    """An autocast context with a policy, a cache or a record; `autocast` makes it.

    It is not a subclass of `torch.autocast`: torch.compile would replace an instance
    of one by its own context, without the policy.

    Attributes:
        cache: The `CastCache` of the policy's kernels: the one given, or that of the
            context entered last.

    Example:
        >>> from halfstep import autocast
        >>> with autocast("cpu", torch.bfloat16, record=True) as context:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> context.report().rows[0][:3]  # operation, module, dtypes of the operands
        ('matmul', '', 'fp32')
    """

    def __init__(
        self,
        torch_context: Autocast,
        policy: Policy | None,
        cache: CastCache | None,
        *,
        cache_weights: bool,
        record: bool,
        matched_rules: set[int] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            torch_context: Sets torch's autocast state.
            policy: Already checked, and attached to the model if it has module rules.
                None: that of the enclosing context, else torch's.
            cache: None: a new one for each entry.
            cache_weights: Whether the cache serves all casts of weights.
            record: Record each operation.
            matched_rules: Collects the rules that have applied. None: the set shared
                by all contexts with this policy.
        """
        active_context.check_key()
        self.device = torch_context.device
        self.policy = policy
        self.cache = cache
        self._torch_context = torch_context
        self._user_cache = cache
        self._cache_weights = cache_weights
        self._matched_rules = matched_rules
        self._record = OperationRecord() if record else None

    @dynamo_disable
    def __enter__(self) -> Self:
        """Enter the context; it may be entered several times."""
        policy = self.policy
        if policy is None:
            outer = active_context.active(self.device)
            policy = outer.policy if outer else TORCH
        op_casts = dispatch_table.op_casts_for(
            policy,
            self.device,
            cache_weights=self._cache_weights,
            record_all=self._record is not None,
        )
        cache = None
        if self._torch_context._cache_enabled:  # noqa: SLF001
            cache = self.cache = (
                CastCache() if self._user_cache is None else self._user_cache
            )
        matched_rules = self._matched_rules
        if matched_rules is None:
            matched_rules = dispatch_table.matched_rules(policy)
        recording = None
        if self._record is not None:
            recording = RecordingMode(self._record, self.device)
        observe = None if recording is None else recording.observe
        context = CastContext(policy, op_casts, cache, matched_rules, observe)
        context.nodes = [torch._C._autograd._get_sequence_nr(), sys.maxsize]  # noqa: SLF001
        context_history.last.append((policy, context.nodes))
        entry = active_context.push(
            self.device,
            context,
            policy,
            torch_context=self._torch_context,
            uses_torch_cache=self._user_cache is None,
            owner=self,
            then=() if recording is None else (recording.stop,),
        )
        if recording is not None:
            try:
                recording.start()
            except BaseException:
                active_context.pop(entry)
                raise
        return self

    def _after_exit(self, entry: Entry, error: BaseException | None) -> None:
        context = entry.context
        assert context is not None  # noqa: S101
        context.nodes[1] = torch._C._autograd._get_sequence_nr()  # noqa: SLF001
        context.observe = None
        if self._user_cache is None:
            context.close()
        self._torch_context.explain(error)
        is_enabled = self._torch_context._enabled  # noqa: SLF001
        if is_enabled and error is None and self._matched_rules is None:
            warning = dispatch_table.unmatched_rule_warning(context.policy)
            if warning:
                warnings.warn(warning, stacklevel=3)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs inside this context.

        Raises:
            TypeError: If it is given no function.
        """
        target: object = function
        if not callable(target):
            raise TypeError(
                f"autocast(...)(function) needs a function, not {target!r}; as a "
                "context manager write: with autocast(...):"
            )
        own = self._torch_context
        is_enabled, cache = own._enabled, own._cache_enabled  # noqa: SLF001
        _warn_of_generator(function, enabled=is_enabled)
        settings = (self.device, own.fast_dtype, is_enabled, cache)
        record = self._record is not None
        rules = self.policy.rules if self.policy else ()
        has_module_rules = any(rule.kind != "op" for rule in rules)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            context: AbstractContextManager[object] = self
            if torch.compiler.is_compiling():
                context = traceable_autocast(
                    settings,
                    self.policy,
                    record=record,
                    has_module_rules=has_module_rules,
                )
            with context:
                return function(*args, **kwargs)

        return run

    @property
    def has_records(self) -> bool:
        """Whether any operation was recorded."""
        return self._record is not None and bool(self._record.counts)

    def report(self) -> Table:
        """Return a table of the operations recorded so far: dtypes, rule and reason.

        Raises:
            UserError: If it was made without `record=True`.
        """
        if self._record is None:
            raise _not_recorded()
        return self._record.table()

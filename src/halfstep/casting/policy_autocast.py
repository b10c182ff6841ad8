"""Autocast contexts with a policy, a `CastCache` or a recorder."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar

import torch

from halfstep._torch.dynamo import dynamo_disable
from halfstep.casting import (
    active_context,
    compile_guard,
    dispatch_kernels,
    dispatch_table,
    recompute,
)
from halfstep.casting.active_context import CastContext
from halfstep.casting.compile_region import traceable_autocast
from halfstep.casting.entered_contexts import PerThreadStack
from halfstep.casting.recorder import Recorder
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError
from halfstep.policy.rules import TORCH, entered_contexts

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table

P = ParamSpec("P")
R = TypeVar("R")


class _Entry(NamedTuple):
    """One entry of a context, with the state to restore."""

    context: CastContext
    guard: int
    pushed: active_context.Pushed
    backward_setting: Any
    nodes: list[int]
    """First sequence number of autograd, and end."""


def _restore(guard: int, setting: Any) -> None:  # noqa: ANN401
    """Restore the state that torch.compile reads; contexts may close in any order."""
    compile_guard.restore_policy_guard(guard if active_context.is_open() else 0)
    compile_guard.restore_backward_autocast(setting)


class PolicyAutocast:
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
        torch_context: torch.autocast,
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
        self._recorder = Recorder(self.device) if record else None
        self._entries: PerThreadStack[_Entry] = PerThreadStack()

    @dynamo_disable
    def __enter__(self) -> Self:
        """Enter the context; it may be entered several times."""
        outer = active_context.active(self.device)
        policy = self.policy or (outer.policy if outer else TORCH)
        op_casts = dispatch_table.op_casts_for(
            policy,
            self.device,
            cache_weights=self._cache_weights,
            record_all=self._recorder is not None,
        )
        dispatch_kernels.install(op_casts)
        if self._recorder is not None:
            self._recorder.start()
        cache = None
        if self._torch_context._cache_enabled:  # noqa: SLF001
            cache = self.cache = (
                CastCache() if self._user_cache is None else self._user_cache
            )
        matched_rules = self._matched_rules
        if matched_rules is None:
            matched_rules = dispatch_table.matched_rules(policy)
        context = CastContext(policy, op_casts, cache, matched_rules, self._recorder)
        self._torch_context.__enter__()  # type: ignore[no-untyped-call]
        nodes = [torch._C._autograd._get_sequence_nr(), sys.maxsize]  # noqa: SLF001
        entered_contexts.last.append((policy, nodes))
        guard, pushed = (
            compile_guard.set_policy_guard(policy),
            recompute.push(self.device, context),
        )
        setting = compile_guard.disable_backward_autocast()
        self._entries.push(_Entry(context, guard, pushed, setting, nodes))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the context entered last, and restore the state before it."""
        warning = self._close(exc_type, exc_value, traceback)
        if warning:
            warnings.warn(warning, stacklevel=2)

    @dynamo_disable
    def _close(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> str:
        """Leave the context entered last; return a warning, or ""."""
        context, guard, pushed, setting, nodes = self._entries.pop()
        nodes[1] = torch._C._autograd._get_sequence_nr()  # noqa: SLF001
        for thread, leave in reversed(context.abandoned):
            if thread == threading.get_ident():
                leave()
        context.recorder = None
        undo: list[Callable[[], object]]
        undo = [partial(_restore, guard, setting)]
        if self._recorder is not None:
            undo.append(self._recorder.stop)
        recompute.pop(pushed, *undo)
        if self._user_cache is None:
            context.close()
        self._torch_context.__exit__(exc_type, exc_value, traceback)
        is_enabled = self._torch_context._enabled  # noqa: SLF001
        if is_enabled and exc_value is None and self._matched_rules is None:
            return dispatch_table.unmatched_rule_warning(context.policy)
        return ""

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs inside this context.

        Raises:
            TypeError: If it is given no function.
        """
        target: object = function
        if not callable(target):
            message = (
                f"autocast(...)(function) needs a function, not {target!r}; as a "
                "context manager write: with autocast(...):"
            )
            raise TypeError(message)
        is_enabled, cache = (
            self._torch_context._enabled,  # noqa: SLF001
            self._torch_context._cache_enabled,  # noqa: SLF001
        )
        settings = (self.device, self._torch_context.fast_dtype, is_enabled, cache)
        record = self._recorder is not None
        rules = self.policy.rules if self.policy else ()
        modules = any(rule.kind != "op" for rule in rules)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            context: AbstractContextManager[object] = self
            if torch.compiler.is_compiling():
                context = traceable_autocast(
                    settings, self.policy, record=record, modules=modules
                )
            with context:
                return function(*args, **kwargs)

        return run

    @property
    def has_records(self) -> bool:
        """Whether any operation was recorded."""
        return self._recorder is not None and self._recorder.has_records

    def report(self) -> Table:
        """Return a table of the operations recorded so far: dtypes, rule and reason.

        Raises:
            UserError: If it was made without `record=True`.
        """
        if self._recorder is None:
            message = (
                "this context recorded nothing, since recording is slow: open it as "
                "autocast(..., record=True) to have a report."
            )
            raise UserError(message)
        return self._recorder.table()

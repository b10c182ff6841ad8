"""Regions with a policy, a cache of their own, or an observer.

In: a region under torch's table. Out: the same region, in which the policy's kernels,
rules on modules and recorder are in force.
"""

from __future__ import annotations

import functools
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
from halfstep.casting.active_context import Frame
from halfstep.casting.compile_region import traced
from halfstep.casting.entered_contexts import Entries
from halfstep.casting.recorder import Recorder
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError
from halfstep.policy.rules import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table

P = ParamSpec("P")
R = TypeVar("R")


class _Entry(NamedTuple):
    """One entry of a region, and what it has to restore."""

    frame: Frame
    shown: int
    pushed: active_context.Pushed
    backward: Any


def _restore(shown: int, setting: Any) -> None:  # noqa: ANN401
    """Restore what compiled code goes by; contexts may close in any order."""
    compile_guard.restore(shown if active_context.is_open() else 0)
    compile_guard.restore_backward(setting)


class Steered:
    """A region that a policy steers; `autocast` makes it.

    It is no `torch.autocast`, on purpose: torch.compile would take such an instance
    for its own and leave the policy out, silently.

    Attributes:
        cache: What serves weights cast by the policy's kernels: the one given, or
            that of the entry made last.
    """

    def __init__(
        self,
        region: torch.autocast,
        policy: Policy | None,
        cache: CastCache | None,
        *,
        weights: bool,
        record: bool,
        matched: set[int] | None = None,
    ) -> None:
        """Take a region and what steers it.

        Args:
            region: Sets torch's state.
            policy: Checked, and attached to the model if it speaks of modules. None:
                that of the region around, else torch's.
            cache: None: one for each entry.
            weights: Let every cast of a weight come from the cache.
            record: Observe each operation.
            matched: Collects the rules that decided something; None: one set for all
                regions with this policy.
        """
        active_context.check_key()
        self.device = region.device
        self.policy = policy
        self.cache = cache
        self._region = region
        self._given = cache
        self._weights = weights
        self._matched = matched
        self._recorder = Recorder(self.device) if record else None
        self._entries: Entries[_Entry] = Entries()

    @dynamo_disable
    def __enter__(self) -> Self:
        """Open a region."""
        surrounding = active_context.in_force(self.device)
        policy = self.policy or (surrounding.policy if surrounding else TORCH)
        rows = dispatch_table.rows_for(
            policy,
            self.device,
            weights=self._weights,
            everything=self._recorder is not None,
        )
        dispatch_kernels.install(rows)
        if self._recorder is not None:
            self._recorder.start()
        cache = None
        if self._region._cache_enabled:  # noqa: SLF001
            cache = self.cache = CastCache() if self._given is None else self._given
        matched = self._matched
        if matched is None:
            matched = dispatch_table.matches(policy)
        frame = Frame(policy, rows, cache, matched, self._recorder)
        self._region.__enter__()  # type: ignore[no-untyped-call]
        shown, pushed = compile_guard.show(policy), recompute.push(self.device, frame)
        self._entries.push(_Entry(frame, shown, pushed, compile_guard.plain_backward()))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the region opened last, and restore what was before it."""
        missed = self._close(exc_type, exc_value, traceback)
        if missed:
            warnings.warn(missed, stacklevel=2)

    @dynamo_disable
    def _close(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> str:
        """Close a region; return what to warn of, "" of nothing."""
        frame, shown, pushed, setting = self._entries.pop()
        for thread, leave in reversed(frame.abandoned):
            if thread == threading.get_ident():
                leave()
        frame.recorder = None
        undo: list[Callable[[], object]]
        undo = [partial(_restore, shown, setting)]
        if self._recorder is not None:
            undo.append(self._recorder.stop)
        recompute.pop(pushed, *undo)
        if self._given is None:
            frame.close()
        self._region.__exit__(exc_type, exc_value, traceback)
        on = self._region._enabled  # noqa: SLF001
        if on and exc_value is None and self._matched is None:
            return dispatch_table.unmatched(frame.policy)
        return ""

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs inside this region.

        Raises:
            TypeError: If it is given no function.
        """
        given: object = function
        if not callable(given):
            message = (
                f"autocast(...)(function) needs a function, not {given!r}; as a "
                "context manager write: with autocast(...):"
            )
            raise TypeError(message)
        on, cache = self._region._enabled, self._region._cache_enabled  # noqa: SLF001
        settings = (self.device, self._region.fast_dtype, on, cache)
        record = self._recorder is not None
        rules = self.policy.rules if self.policy else ()
        modules = any(rule.kind != "op" for rule in rules)

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            region: AbstractContextManager[object] = self
            if torch.compiler.is_compiling():
                region = traced(settings, self.policy, record=record, modules=modules)
            with region:
                return function(*args, **kwargs)

        return inside

    @property
    def recorded(self) -> bool:
        """Something was observed."""
        return self._recorder is not None and self._recorder.seen

    def report(self) -> Table:
        """Return what ran how, and why, since the region was made: a row each.

        Raises:
            UserError: If it was made without `record=True`.
        """
        if self._recorder is None:
            message = (
                "this region recorded nothing, since recording is slow: open it as "
                "autocast(..., record=True) to have a report."
            )
            raise UserError(message)
        return self._recorder.table()

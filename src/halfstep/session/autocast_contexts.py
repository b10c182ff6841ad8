"""The autocast contexts of a Session, which share a cast cache."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from halfstep.casting import active_context, dispatch_table, weight_cache
from halfstep.casting.autocast_mode import Autocast, PolicyAutocast
from halfstep.casting.grad_accumulation import Fp32GradAccumulator
from halfstep.casting.weight_cache import CastCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.machine.recommendation import Choice
    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table


class AutocastContexts:
    """The contexts that a Session opens for forward pass and loss.

    Each fp32 weight is cast once per optimizer step, however many micro-batches it has,
    and its 16-bit gradients are accumulated in fp32.

    Attributes:
        cache: The casts of the weights.
        grad_accumulator: For 16-bit gradients of fp32 weights; None at other levels.
    """

    _opened = 0
    """Contexts that all sessions have opened."""

    def __init__(
        self, choice: Choice, policy: Policy, device: str, accumulate: int = 1
    ) -> None:
        """Prepare the contexts; without autocast at this level they do nothing."""
        casts_weights = choice.level.autocast and not choice.level.low_weights
        self.grad_accumulator = Fp32GradAccumulator() if casts_weights else None
        size = weight_cache.SMALL
        if accumulate == 1:
            # The caching allocator of a GPU makes new memory cheap at any size.
            size = weight_cache.LARGE if device == "cpu" else sys.maxsize
        self.cache = CastCache(
            self.grad_accumulator, for_training=True, max_recast_numel=size
        )
        self._policy = policy
        self._matched: set[int] = set()
        self._needs_refresh = False
        self._num_opened = 0
        """Contexts opened since the last micro-batch."""
        self._reuses_last_casts = False
        self._reported_unmatched = False
        self._needs_context = choice.level.autocast
        self._opened_before = AutocastContexts._opened + active_context.num_planned
        low = choice.format.dtype if choice.level.autocast else None
        context = Autocast(device, low, choice.level.autocast, None)
        self._context: Autocast | PolicyAutocast = context
        self._recording_context: PolicyAutocast | None = None
        if not choice.level.autocast:
            return
        dispatch_table.check_device(policy, device)
        self._context, self._recording_context = (
            PolicyAutocast(
                context,
                policy,
                self.cache,
                cache_weights=casts_weights,
                record=record,
                matched_rules=self._matched,
            )
            for record in (False, True)
        )

    def select(self, *, record: bool) -> Autocast | PolicyAutocast:
        """Return the context for a micro-batch; `record` its operations for `table`."""
        if self._needs_refresh and torch.is_grad_enabled():
            self.cache.refresh()
        elif not (self._reuses_last_casts or self.cache.is_open):
            # Between two forward passes of a micro-batch, and around an evaluation,
            # weights are often changed through `weight.data`, which is not detected.
            self.cache.clear()
        self._num_opened += not self.cache.is_open
        self._needs_refresh = self._reuses_last_casts = False
        AutocastContexts._opened += 1
        if record and self._recording_context is not None:
            return self._recording_context
        return self._context

    @property
    def is_missing(self) -> bool:
        """Whether the level needs a context, and none was opened since it was made.

        Those of other sessions count: one may be open around several models. So do
        modules that `rewrite` makes, which need none.
        """
        opened = AutocastContexts._opened + active_context.num_planned
        return self._needs_context and self._opened_before == opened

    def after_microbatch(self) -> None:
        """Keep the casts for the next micro-batch if this one opened one context."""
        self._reuses_last_casts = self._num_opened == 1
        self._num_opened = 0

    def after_step(self, num_implied: int) -> str:
        """Record that the optimizer has stepped; return a warning, or "".

        After the first step it warns of rules that matched nothing, except the last
        `num_implied`, which are not the user's.
        """
        self._needs_refresh = True
        self._num_opened = 0
        if self._reported_unmatched or isinstance(self._context, Autocast):
            return ""
        self._reported_unmatched = True
        count = len(self._policy.rules)
        return dispatch_table.unmatched_rule_warning(
            self._policy, self._matched | set(range(count - num_implied, count))
        )

    def table(self) -> Table | None:
        """Return the recorded operations; None without records."""
        if self._recording_context is None or not self._recording_context.has_records:
            return None
        return self._recording_context.report()


class ForwardContext(ContextDecorator):
    """`session.autocast()`: contexts that open and close together.

    Ctrl-C comes between two instructions. So a context is opened and recorded in one,
    `extend`; and a `map` that is asked again, after it was interrupted, closes no
    context twice.

    Args:
        prepare: Called at each entry; returns the contexts.
    """

    def __init__(
        self, prepare: Callable[[], list[AbstractContextManager[Any]]]
    ) -> None:
        self._prepare = prepare
        self._entries: list[_Entry] = []

    def __enter__(self) -> Any:  # noqa: ANN401 -- what the last context returns
        """Open the contexts; return what the last one returns."""
        entry = _Entry(self._prepare())
        self._entries.append(entry)
        try:
            entry.opened.extend(map(methodcaller("__enter__"), entry.contexts))
            return entry.opened[-1]
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: object) -> None:
        """Close the contexts that are open, the last one first."""
        try:
            deque(self._entries[-1].closing(*error), maxlen=0)
        except BaseException:
            deque(self._entries[-1].closing(*error), maxlen=0)
            raise
        finally:
            self._entries.pop()


@dataclass(slots=True)
class _Entry:
    """One `with` of a `ForwardContext`."""

    contexts: list[AbstractContextManager[Any]]
    opened: list[Any] = field(default_factory=list)
    """What each context that is open has returned."""
    _closing: Iterator[object] | None = None

    def closing(self, *error: object) -> Iterator[object]:
        """Return the iterator that closes one context at a time, always the same."""
        if self._closing is None:
            is_open = self.contexts[: len(self.opened)]
            self._closing = map(methodcaller("__exit__", *error), reversed(is_open))
        return self._closing

"""The autocast contexts of one Session's forward passes.

In: a choice of level and format, a policy. Out: contexts that share one cache of casts
and one record, from one optimizer step to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.casting import dispatch_table
from halfstep.casting.autocast_mode import Autocast
from halfstep.casting.grad_accumulation import Fp32GradAccumulator
from halfstep.casting.policy_autocast import PolicyAutocast
from halfstep.casting.weight_cache import CastCache

if TYPE_CHECKING:
    from halfstep.machine.recommendation import Choice
    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table


class AutocastContexts:
    """What a Session opens for the forward pass and the loss.

    Where weights are fp32 each is cast once for an optimizer step, however many
    micro-batches it has, and its 16-bit gradients are added up in fp32 as they come.

    Attributes:
        cache: The casts of the weights.
        grad_accumulator: Of 16-bit gradients of fp32 weights; None where there are
            none.
    """

    def __init__(self, choice: Choice, policy: Policy, device: str) -> None:
        """Prepare the contexts; without autocast at this level they do nothing.

        Raises:
            UserError: If the device has no table, and the policy needs one.
        """
        fp32 = choice.level.autocast and not choice.level.low_weights
        self.grad_accumulator = Fp32GradAccumulator() if fp32 else None
        self.cache = CastCache(self.grad_accumulator, for_training=True)
        self._policy = policy
        self._matched: set[int] = set()
        self._needs_refresh = False
        self._num_opened = 0
        """Contexts since the last micro-batch."""
        self._keeps_casts = False
        self._reported_unmatched = False
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
                cache_weights=fp32,
                record=record,
                matched_rules=self._matched,
            )
            for record in (False, True)
        )

    def select(self, *, record: bool) -> Autocast | PolicyAutocast:
        """Return the context for a micro-batch.

        Args:
            record: Observe its operations for `table`; without effect at a level
                without autocast, where each runs as it is called.
        """
        if self._needs_refresh and torch.is_grad_enabled():
            self.cache.refresh()
        elif not (self._keeps_casts or self.cache.is_open):
            # Between two forward passes of a micro-batch, and around an evaluation,
            # weights are often moved through `weight.data`, which nothing counts.
            self.cache.clear()
        self._num_opened += not self.cache.is_open
        self._needs_refresh = self._keeps_casts = False
        if record and self._recording_context is not None:
            return self._recording_context
        return self._context

    def after_microbatch(self) -> None:
        """Keep the casts for the next micro-batch, if this had one context alone."""
        self._keeps_casts = self._num_opened == 1
        self._num_opened = 0

    def after_step(self, num_implied: int) -> str:
        """Note that the optimizer has stepped; return what to warn of, or "".

        After the first step, that is rules that matched nothing; the last `num_implied`
        are not the user's own.
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
        """Return what ran how, if a context was recorded."""
        if self._recording_context is None or not self._recording_context.has_records:
            return None
        return self._recording_context.report()

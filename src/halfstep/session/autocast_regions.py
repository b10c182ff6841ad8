"""The autocast contexts of one Session's forward passes.

In: a choice of level and format, a policy. Out: regions that share one cache of casts
and one record, from one optimizer step to the next.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from halfstep.casting import dispatch_table
from halfstep.casting.autocast_mode import Autocast
from halfstep.casting.grad_accumulation import Fp32GradAccumulator
from halfstep.casting.policy_autocast import PolicyAutocast
from halfstep.casting.weight_cache import CastCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from halfstep.machine.recommendation import Choice
    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table


class AutocastContexts:
    """What a Session opens for the forward pass and the loss.

    Where weights are fp32 each is cast once for an optimizer step, however many
    micro-batches it has, and its 16-bit gradients are added up in fp32 as they come.

    Attributes:
        cache: The casts of the weights.
    """

    def __init__(self, choice: Choice, policy: Policy, device: str) -> None:
        """Prepare the regions.

        Args:
            choice: Level and format; without autocast the regions do nothing.
            policy: Its rules on modules are already attached to the model.
            device: Device type of the model.

        Raises:
            UserError: If the device has no table, and the policy needs one.
        """
        self._grad_accumulator = Fp32GradAccumulator()
        fp32 = choice.level.autocast and not choice.level.low_weights
        self.cache = CastCache(self._grad_accumulator if fp32 else None)
        self._policy = policy
        self._matched: set[int] = set()
        self._needs_refresh = False
        self._was_evaluating = False
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
        """Return the region for a micro-batch.

        Args:
            record: Observe its operations for `table`; without effect at a level
                without autocast, where each runs as it is called.
        """
        if not torch.is_grad_enabled() or self._was_evaluating:
            # Averaged weights are often put in through `weight.data`, which nothing
            # counts, for an evaluation, and taken out after it.
            self.cache.clear()
        elif self._needs_refresh:
            self.cache.refresh()
        self._needs_refresh, self._was_evaluating = False, not torch.is_grad_enabled()
        if record and self._recording_context is not None:
            return self._recording_context
        return self._context

    @contextlib.contextmanager
    def accumulate_grads(self, loss: Tensor) -> Iterator[None]:
        """Take in 16-bit gradients during the backward pass of a loss.

        Not those of another one inside it, as `torch.autograd.grad` in a hook is: its
        gradients are its caller's.
        """
        self._grad_accumulator.start(loss)
        try:
            yield
        finally:
            self._grad_accumulator.stop()

    def after_step(self, num_implied: int) -> str:
        """Take note that the optimizer has stepped.

        Args:
            num_implied: How many of the policy's last rules nobody asked for.

        Returns:
            What to warn of: rules that matched nothing in the first step; "" of none.
        """
        self._needs_refresh = True
        if self._reported_unmatched or isinstance(self._context, Autocast):
            return ""
        self._reported_unmatched = True
        count = len(self._policy.rules)
        return dispatch_table.unmatched_rule_warning(
            self._policy, self._matched | set(range(count - num_implied, count))
        )

    def table(self) -> Table | None:
        """Return what ran how, if a region was recorded."""
        if self._recording_context is None or not self._recording_context.has_records:
            return None
        return self._recording_context.report()

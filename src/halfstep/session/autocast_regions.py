"""The regions that one Session's forward passes run under.

In: a choice of level and format, a policy. Out: regions that share one cache of casts
and one record, from one optimizer step to the next.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from halfstep.casting import dispatch_table
from halfstep.casting.autocast_mode import Region
from halfstep.casting.grad_accumulation import Gradients
from halfstep.casting.policy_autocast import Steered
from halfstep.casting.weight_cache import CastCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from halfstep.machine.recommendation import Choice
    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table


class Regions:
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
        self._gradients = Gradients()
        fp32 = choice.level.autocast and not choice.level.low_weights
        self.cache = CastCache(self._gradients if fp32 else None)
        self._policy = policy
        self._matched: set[int] = set()
        self._renew = False
        self._evaluated = False
        self._told = False
        low = choice.format.dtype if choice.level.autocast else None
        region = Region(device, low, choice.level.autocast, None)
        self._region: Region | Steered = region
        self._recording: Steered | None = None
        if not choice.level.autocast:
            return
        dispatch_table.check_device(policy, device)
        self._region, self._recording = (
            Steered(
                region,
                policy,
                self.cache,
                weights=fp32,
                record=record,
                matched=self._matched,
            )
            for record in (False, True)
        )

    def open(self, *, record: bool) -> Region | Steered:
        """Return the region for a micro-batch.

        Args:
            record: Observe its operations for `table`; without effect at a level
                without autocast, where each runs as it is called.
        """
        if not torch.is_grad_enabled() or self._evaluated:
            # Averaged weights are often put in through `weight.data`, which nothing
            # counts, for an evaluation, and taken out after it.
            self.cache.clear()
        elif self._renew:
            self.cache.renew()
        self._renew, self._evaluated = False, not torch.is_grad_enabled()
        if record and self._recording is not None:
            return self._recording
        return self._region

    @contextlib.contextmanager
    def folding(self, loss: Tensor) -> Iterator[None]:
        """Take in 16-bit gradients during the backward pass of a loss.

        Not those of another one inside it, as `torch.autograd.grad` in a hook is: its
        gradients are its caller's.
        """
        self._gradients.begin(loss)
        try:
            yield
        finally:
            self._gradients.end()

    def stepped(self, implied: int) -> str:
        """Take note that the optimizer has stepped.

        Args:
            implied: How many of the policy's last rules nobody asked for.

        Returns:
            What to warn of: rules that matched nothing in the first step; "" of none.
        """
        self._renew = True
        if self._told or isinstance(self._region, Region):
            return ""
        self._told = True
        count = len(self._policy.rules)
        return dispatch_table.unmatched(
            self._policy, self._matched | set(range(count - implied, count))
        )

    def table(self) -> Table | None:
        """Return what ran how, if a region was recorded."""
        if self._recording is None or not self._recording.recorded:
            return None
        return self._recording.report()

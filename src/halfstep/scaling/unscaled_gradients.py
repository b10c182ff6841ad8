"""Sums of gradients that are unscaled and checked after each backward pass.

In: parameters whose `.grad` holds what one pass left. Out: unscaled sums, and what to
do with a pass that overflowed: count it, leave it out, or run it again.

Why: gradients of two loss scales cannot be added, and an inf that has been added can
no longer be taken out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep._torch.async_read import to_device_async
from halfstep.numerics.local_tensor import local_values
from halfstep.scaling.unscale import FoundInfReduction, reduction_groups, unscale_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.distributed as dist

    from halfstep.scaling.loss_scaler import LossScaler


class UnscaledGradients:
    """Unscaled gradients of the passes so far.

    Args:
        drop: Leave out a pass that overflowed, and let the mean of the others stand
            for all; otherwise one such pass spoils the step.
    """

    def __init__(self, *, drop: bool) -> None:
        self._drop = drop
        self._totals: dict[Tensor, Tensor] = {}
        self._restored: dict[Tensor, tuple[Tensor, int]] = {}
        self._num_passes = 0
        self._num_overflowed: Tensor | None = None

    @property
    def parameters(self) -> Iterable[Tensor]:
        """Those whose gradients are entered."""
        return self._totals.keys()

    @property
    def is_open(self) -> bool:
        """A pass has been entered since the last `close`."""
        return self._num_passes > 0

    @torch.no_grad()
    def sync_user_edits(self) -> None:
        """Take in what was done to the sums while they were in `.grad`."""
        for parameter, (restored, version) in self._restored.items():
            current = parameter.grad
            if current is None:
                del self._totals[parameter]
            elif current is not restored or current._version != version:  # noqa: SLF001
                self._totals[parameter] = (current / self._mean_factor(current)).to(
                    current.dtype
                )
        if self._restored and not self._totals:
            self.reset()
        self._restored.clear()

    def _mean_factor(self, total: Tensor) -> Tensor | int:
        """Return how many passes each good one stands for."""
        if not self._drop or self._num_overflowed is None:
            return 1
        num_clean = (self._num_passes - self._num_overflowed).clamp(min=1)
        return self._num_passes / to_device_async(num_clean, total.device)

    @torch.no_grad()
    def accumulate(self, parameters: Sequence[Tensor], found_inf: Tensor) -> None:
        """Add what a pass left in `.grad`, unscaled, and take it out of there.

        Args:
            parameters: Those whose `.grad` is to be entered.
            found_inf: 0.0 or 1.0: whether these gradients held inf or NaN, shape ().
        """
        self._num_passes += 1
        num_overflowed = self._num_overflowed
        self._num_overflowed = (
            found_inf.clone() if num_overflowed is None else num_overflowed + found_inf
        )
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if self._drop:
                # Filled, not multiplied by 0: that would make NaN of an inf.
                values = local_values(gradient)
                values.masked_fill_(found_inf.to(values.device) > 0, 0)
            total = self._totals.get(parameter)
            if total is None:
                # Its memory may be a buffer that the next pass writes to.
                self._totals[parameter] = gradient.clone()
            elif total.is_sparse:
                self._totals[parameter] = gradient + total
            else:
                total.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def restore_grads(self) -> Tensor:
        """Put the sums into `.grad`; return whether the step must be skipped.

        Returns:
            1.0 if a pass overflowed; where they are dropped, if all of them did.
            float32, shape ().
        """
        num_overflowed = self._num_overflowed
        assert num_overflowed is not None, "restore_grads() comes after accumulate()"  # noqa: S101
        for parameter, total in self._totals.items():
            grad = total
            if self._drop:
                grad = (total * self._mean_factor(total)).to(total.dtype)
            parameter.grad = grad
            self._restored[parameter] = grad, grad._version  # noqa: SLF001
        found_inf = (
            num_overflowed >= self._num_passes if self._drop else num_overflowed > 0
        ).float()
        if self._num_passes > 1:
            # Finite parts may have a sum that is not.
            sums = [grad for grad, _ in self._restored.values()]
            found_inf = torch.maximum(
                found_inf, unscale_(sums, torch.ones_like(found_inf))
            )
        return found_inf

    def num_dropped(self) -> Tensor | int:
        """Return how many passes were left out, shape ()."""
        return (
            self._num_overflowed
            if self._drop and self._num_overflowed is not None
            else 0
        )

    def reset(self) -> None:
        """Begin anew."""
        self._totals.clear()
        self._restored.clear()
        self._num_passes, self._num_overflowed = 0, None


def run_pass(
    scaler: LossScaler,
    backward: Callable[[bool], None],
    parameters: Sequence[Tensor],
    *,
    retries: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Run a backward pass by itself and unscale what it left in `.grad`.

    Args:
        scaler: Its scale.
        backward: Runs the pass of the scaled loss; told whether to keep the graph.
        parameters: All that it reaches. What is in their `.grad` is lost.
        retries: How often to run it again at a lower scale if it overflows, >= 0; the
            host waits for the device after each pass but the last.
        group: Ranks that must agree.

    Returns:
        1.0 if the last try overflowed on any rank, otherwise 0.0. float32, shape ().
    """
    for retries_left in range(retries, -1, -1):
        for parameter in parameters:
            parameter.grad = None
        backward(retries_left > 0)
        gradients = [p.grad for p in parameters if p.grad is not None]
        found_inf = scaler.unscale_(gradients)
        found_inf = FoundInfReduction.start(
            found_inf, reduction_groups(gradients, group)
        ).wait()
        if not retries_left or not found_inf:
            break
        scaler.back_off()
    return found_inf


def free_graph(loss: Tensor) -> None:
    """Free the graph that was kept for another try, though the user holds the loss."""
    if not loss._is_view():  # noqa: SLF001
        loss.detach_()

"""Backward passes looked at one by one, before their gradients are added up.

In: parameters whose `.grad` holds what one pass left. Out: unscaled sums, and what to
do with a pass that overflowed: count it, leave it out, or run it again.

Why: gradients of two loss scales cannot be added, and an inf that has been added can
no longer be taken out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep._torch.async_read import moved
from halfstep.numerics.local_tensor import stored
from halfstep.scaling.unscale import Agreement, groups_of, unscale_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.distributed as dist

    from halfstep.scaling.loss_scaler import LossScaler


class Ledger:
    """Unscaled gradients of the passes so far.

    Args:
        drop: Leave out a pass that overflowed, and let the mean of the others stand
            for all; otherwise one such pass spoils the step.
    """

    def __init__(self, *, drop: bool) -> None:
        self._drop = drop
        self._totals: dict[Tensor, Tensor] = {}
        self._shown: dict[Tensor, tuple[Tensor, int]] = {}
        self._passes = 0
        self._bad: Tensor | None = None

    @property
    def parameters(self) -> Iterable[Tensor]:
        """Those whose gradients are entered."""
        return self._totals.keys()

    @property
    def is_open(self) -> bool:
        """A pass has been entered since the last `close`."""
        return self._passes > 0

    @torch.no_grad()
    def take_back(self) -> None:
        """Take in what was done to the sums while they were in `.grad`."""
        for parameter, (shown, version) in self._shown.items():
            now = parameter.grad
            if now is None:
                del self._totals[parameter]
            elif now is not shown or now._version != version:  # noqa: SLF001
                self._totals[parameter] = (now / self._share(now)).to(now.dtype)
        if self._shown and not self._totals:
            self.close()
        self._shown.clear()

    def _share(self, total: Tensor) -> Tensor | int:
        """Return how many passes each good one stands for."""
        if not self._drop or self._bad is None:
            return 1
        good = (self._passes - self._bad).clamp(min=1)
        return self._passes / moved(good, total.device)

    @torch.no_grad()
    def enter(self, parameters: Sequence[Tensor], found_inf: Tensor) -> None:
        """Add what a pass left in `.grad`, unscaled, and take it out of there.

        Args:
            parameters: Those whose `.grad` is to be entered.
            found_inf: 0.0 or 1.0: whether these gradients held inf or NaN, shape ().
        """
        self._passes += 1
        bad = self._bad
        self._bad = found_inf.clone() if bad is None else bad + found_inf
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if self._drop:
                # Filled, not multiplied by 0: that would make NaN of an inf.
                values = stored(gradient)
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
    def show(self) -> Tensor:
        """Put the sums into `.grad`; return whether the step must be skipped.

        Returns:
            1.0 if a pass overflowed; where they are dropped, if all of them did.
            float32, shape ().
        """
        bad = self._bad
        assert bad is not None, "show() comes after enter()"  # noqa: S101
        for parameter, total in self._totals.items():
            shown = total
            if self._drop:
                shown = (total * self._share(total)).to(total.dtype)
            parameter.grad = shown
            self._shown[parameter] = shown, shown._version  # noqa: SLF001
        spoilt = (bad >= self._passes if self._drop else bad > 0).float()
        if self._passes > 1:
            # Finite parts may have a sum that is not.
            sums = [shown for shown, _ in self._shown.values()]
            spoilt = torch.maximum(spoilt, unscale_(sums, torch.ones_like(spoilt)))
        return spoilt

    def dropped(self) -> Tensor | int:
        """Return how many passes were left out, shape ()."""
        return self._bad if self._drop and self._bad is not None else 0

    def close(self) -> None:
        """Begin anew."""
        self._totals.clear()
        self._shown.clear()
        self._passes, self._bad = 0, None


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
    for left in range(retries, -1, -1):
        for parameter in parameters:
            parameter.grad = None
        backward(left > 0)
        gradients = [p.grad for p in parameters if p.grad is not None]
        found = scaler.unscale_(gradients)
        found = Agreement.begin(found, groups_of(gradients, group)).wait()
        if not left or not found:
            break
        scaler.back_off()
    return found


def let_go(loss: Tensor) -> None:
    """Free the graph that was kept for another try, though the user holds the loss."""
    if not loss._is_view():  # noqa: SLF001
        loss.detach_()

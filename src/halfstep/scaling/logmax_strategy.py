"""A loss scale from statistics of the largest gradient.

In: the unscaled gradients of each step. Out: a scale that is rarely too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from halfstep._torch.async_read import to_device_async
from halfstep.errors import require
from halfstep.numerics.exponents import largest_magnitude, power_of_two
from halfstep.scaling.unscale import reduce_over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from halfstep.scaling.loss_scale import ScaleState

_OVERFLOW_LOG2 = 16
"""fp16 overflows from about 2**16."""

_MOMENTS = ("fast_mean", "slow_mean", "slow_square", "steps")


class LogMaxStrategy:
    """Asks for the scale that statistics of the largest gradient call safe.

    Why: the largest gradient of a step is roughly log-normal, and so has a bound that
    it passes with a known probability. No scale has to overflow to be ruled out. It
    sees gradients of parameters alone: those of activations may be larger.

    Formula (g gradients, S scale, ema with bias corrected):

        x  = log2(max(abs(g))), or 16 - log2(S) after an overflow: at least that
        m  = ema(x, beta1)
        s  = sqrt(ema(x * x, beta2) - ema(x, beta2)**2)
        S' = 2**floor(16 - (m + k * s))

    The original does not round S' to a power of two, and takes x = 16 after an
    overflow, which is too much by log2(S).

    Args:
        beta1: Decay of the mean, in [0, 1): about 100 steps.
        beta2: Decay of the spread, in [0, 1): about 1000 steps.
        k: Standard deviations to stay away, >= 0; 3.09 is passed once in 1000 steps.
        group: Ranks whose gradients count; default all. Each has to come at each step.

    Raises:
        UserError: If a number is out of its range.

    References:
        Kuchaiev et al., "Mixed-Precision Training for NLP and Speech Recognition with
        OpenSeq2Seq", 2018.
    """

    name = "logmax"

    def __init__(
        self,
        beta1: float = 0.99,
        beta2: float = 0.999,
        k: float = 3.09,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require("beta1", beta1, 0 <= beta1 < 1, "in [0, 1)")
        require("beta2", beta2, 0 <= beta2 < 1, "in [0, 1)")
        require("k", k, k >= 0, "at least 0")
        self._beta1, self._beta2 = beta1, beta2
        self._k, self._group = k, group
        self._moments = torch.zeros(len(_MOMENTS), dtype=torch.float64)

    def on_loss(self, loss: Tensor, state: ScaleState) -> None:
        """Let the scale stay."""

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> Tensor:
        """Take in the largest gradient of a step; ask for a scale above all likely."""
        # Metal has no double.
        scale = state.scale if state.scale.is_mps else state.scale.double()
        absmax = largest_magnitude(gradients, scale)
        overflowed = (found_inf.to(scale.device) > 0) | ~absmax.isfinite()
        x = torch.where(overflowed, _OVERFLOW_LOG2 - scale.log2(), absmax.log2())
        x = reduce_over_ranks(x, dist.ReduceOp.MAX, self._group)
        self._moments = self._updated_moments(x)
        fast, slow, square, steps = self._moments
        unbiased, unbiased2 = 1 - self._beta1**steps, 1 - self._beta2**steps
        variance = square / unbiased2 - (slow / unbiased2) ** 2
        bound = fast / unbiased + self._k * variance.clamp(min=0).sqrt()
        safe = power_of_two((_OVERFLOW_LOG2 - bound).floor().nan_to_num())
        # Nothing but zeros so far: there is no mean to speak of.
        return torch.where(steps > 0, safe, state.scale)

    def _updated_moments(self, x: Tensor) -> Tensor:
        """Return the moments and one more x; -inf, of nothing but zeros, is none."""
        before = to_device_async(self._moments, x.device).to(x)
        fast, slow, square, steps = before
        after = (
            self._beta1 * fast + (1 - self._beta1) * x,
            self._beta2 * slow + (1 - self._beta2) * x,
            self._beta2 * square + (1 - self._beta2) * x * x,
            steps + 1,
        )
        return torch.where(x > -torch.inf, torch.stack(after), before)

    def on_found_inf(self, state: ScaleState, found_inf: Tensor) -> None:
        """Take note of nothing more."""

    def state_dict(self) -> dict[str, Any]:
        """Return the moments. Waits for the device."""
        return dict(zip(_MOMENTS, self._moments.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved moments."""
        saved = [state.get(name, 0.0) for name in _MOMENTS]
        self._moments = torch.tensor(saved, dtype=torch.float64)

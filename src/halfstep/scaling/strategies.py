"""Strategies that compute a loss scale from gradients: "measured" and "logmax".

In: each loss before its backward pass, the unscaled gradients after it. Out: the scale
that the strategy proposes, or None, for `advance`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from halfstep._torch.async_read import to_device_async
from halfstep.nonfinite.graph import nodes_of
from halfstep.numerics.exponents import (
    BINS,
    count_exponents,
    largest_magnitude,
    largest_safe_scale,
    power_of_two,
    unscale_histogram,
)
from halfstep.scaling.found_inf_reduction import reduce_over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from halfstep.scaling.loss_scale import ScaleState

_OVERFLOW_LOG2 = 16
"""fp16 overflows from about 2**16."""

_MOMENTS = ("fast_mean", "slow_mean", "slow_square", "steps")

_NUM_RECENT = 10
"""The lowest of so many measurements is used: batches differ by more than `margin`."""

_MAX_TRIALS = 12
"""Maximum number of trial backward passes. Usually two; enough for scales of 2**-22."""

_MAX_TRIAL_SCALE = 2.0**24
"""If all gradients are zero at this scale, higher scales are not tried."""


class LogMaxStrategy:
    """Proposes a scale from the statistics of each step's largest gradient.

    Why: the largest gradient of a step is roughly log-normal, so a bound can be given
    that it exceeds with a known probability, without overflows to find it. It observes
    only gradients of parameters: those of activations may be larger.

    Formula (g gradients, S scale, ema with bias corrected):

        x  = log2(max(abs(g))), or its lower bound 16 - log2(S) after an overflow
        m  = ema(x, beta1)
        s  = sqrt(ema(x * x, beta2) - ema(x, beta2)**2)
        S' = 2**floor(16 - (m + k * s))

    The original does not round S' to a power of two, and takes x = 16 after an
    overflow, which is too much by log2(S).

    Args:
        beta1: Decay of the mean, in [0, 1): about 100 steps.
        beta2: Decay of the spread, in [0, 1): about 1000 steps.
        k: Margin in standard deviations, >= 0; 3.09 is exceeded once in 1000 steps.
        group: Ranks to include; default all. Each must call `propose` in each step.

    References:
        Kuchaiev et al., "Mixed-Precision Training for NLP and Speech Recognition with
        OpenSeq2Seq", 2018.
    """

    def __init__(
        self,
        beta1: float = 0.99,
        beta2: float = 0.999,
        k: float = 3.09,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._beta1, self._beta2 = beta1, beta2
        self._k, self._group = k, group
        self._moments = torch.zeros(len(_MOMENTS), dtype=torch.float64)

    def on_loss(self, loss: Tensor, state: ScaleState) -> None:
        """Do nothing."""

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> Tensor:
        """Update the statistics with a step's largest gradient; propose a scale.

        Args:
            gradients: Unscaled gradients. Several optimizers may make several calls:
                the lowest result is used.
            state: The state during the backward passes.
            found_inf: Non-zero if a gradient held inf or NaN. Shape ().

        Returns:
            The scale for the next step, a power of two.
        """
        # MPS has no double.
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
        # With only zero gradients so far, there are no statistics.
        return torch.where(steps > 0, safe, state.scale)

    def _updated_moments(self, x: Tensor) -> Tensor:
        """Return the moments updated with x; -inf (all gradients zero) is ignored."""
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
        """Do nothing: `propose` has used the flag."""

    def state_dict(self) -> dict[str, Any]:
        """Return the moments. Synchronizes with the device."""
        return dict(zip(_MOMENTS, self._moments.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved moments; {} starts again."""
        saved = [state.get(name, 0.0) for name in _MOMENTS]
        self._moments = torch.tensor(saved, dtype=torch.float64)


class MeasuredStrategy:
    """Proposes the largest scale at which no 16-bit gradient overflows.

    Why: growth and back-off find that scale by skipping steps, again after each growth.
    Most overflows happen inside the network, in gradients of activations; gradients of
    parameters, fp32 under autocast, do not show them. So hooks on all nodes of the
    graph measure a backward pass. One measurement covers one batch, so the lowest of
    the last ten is used, which steps that overflow lower too.

    The first step is preceded by trials: backward passes at several scales, which do
    not touch `.grad` and synchronize with the device. The random state is restored;
    hooks of tensors run, those of DDP do not. There is no trial if a node's backward is
    written in Python, since it may support one pass only (compiled code, reentrant
    checkpoints, fused losses); the first step then runs at the rule's own scale and is
    measured. Functions that can run again set `ctx.repeatable = True`. Gradients inside
    such nodes are not measured.

    Args:
        every: Steps between measurements, >= 1. Gradients drift over hundreds of steps,
            and a measurement costs a pass over all of them: 100. Losses with separate
            optimizers count as alternate steps: with two, an odd number measures both.
        margin: Powers of two to stay below overflow, >= 0: see `largest_safe_scale`.
        group: Ranks that measure together; default all. Each must take part each time.
    """

    def __init__(
        self,
        every: int = 100,
        margin: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._every, self._margin, self._group = every, margin, group
        self._steps, self._in_step = 0, False
        self._hook_handles: list[RemovableHandle] = []
        self._counts: dict[torch.device, Tensor] = {}
        self._recent: deque[Tensor] = deque(maxlen=_NUM_RECENT)

    def on_loss(self, loss: Tensor, state: ScaleState) -> Tensor | None:
        """Add hooks to the graph if a measurement is due; run trials for the first.

        Returns:
            The scale to start with, or None.
        """
        if loss.grad_fn is None:
            return None
        first = self._steps == 0
        if not self._in_step:
            self._steps, self._in_step = self._steps + 1, True
        if (self._steps - 1) % self._every:
            return None
        nodes = [*nodes_of(loss.grad_fn)]
        self._hook_handles += [
            node.register_prehook(self._count_gradients) for node in nodes
        ]
        return self._find_first_scale(loss, nodes, state) if first else None

    def _count_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Count the exponents of gradients that arrive at a node."""
        for gradient in gradients:
            if gradient is not None and gradient.dtype == torch.float16:
                # One histogram per device: each has its own autograd thread.
                before = self._counts.get(gradient.device, 0)
                self._counts[gradient.device] = before + count_exponents(gradient)

    def _pop_histogram(self, scale: Tensor) -> Tensor:
        """Return the histogram of all ranks, unscaled, and reset the counts."""
        total = torch.zeros(BINS, dtype=torch.int64, device=scale.device)
        while self._counts:
            total += self._counts.popitem()[1].to(total.device)
        return unscale_histogram(
            reduce_over_ranks(total, dist.ReduceOp.SUM, self._group), scale
        )

    def _find_first_scale(
        self, loss: Tensor, nodes: Sequence[Node], state: ScaleState
    ) -> Tensor | None:
        """Return a safe first scale for a loss, from trial passes.

        Each pass proposes the scale of the next, until a scale is proposed that was
        tried: it is then measured, not extrapolated from a lower scale.
        """
        if not all(map(_is_repeatable, nodes)):
            return None
        accumulate_nodes = [
            node for node in nodes if type(node).__name__ == "AccumulateGrad"
        ]
        leaves: list[Tensor] = [end.variable for end in accumulate_nodes]  # type: ignore[attr-defined]
        devices = {leaf.device for leaf in leaves if leaf.device.type != "cpu"}
        device_type = max((device.type for device in devices), default="cpu")
        scale, ceiling, tried_scales = 1.0, math.inf, set[float]()
        with torch.random.fork_rng(devices, device_type=device_type):
            while scale not in tried_scales and len(tried_scales) < _MAX_TRIALS:
                tried_scales.add(scale)
                histogram = self._trial_histogram(
                    loss, leaves, torch.full_like(state.scale, scale)
                )
                if not histogram.any():
                    return None
                safe = largest_safe_scale(histogram, torch.float16, self._margin).item()
                if histogram[-1] > 0:
                    safe = ceiling = scale / 4
                elif math.isnan(safe) and scale < _MAX_TRIAL_SCALE:
                    safe = scale * 2**12
                elif math.isnan(safe):
                    return None
                scale = min(safe, ceiling)
        return torch.full_like(state.scale, scale) if scale in tried_scales else None

    def _trial_histogram(
        self, loss: Tensor, leaves: Sequence[Tensor], scale: Tensor
    ) -> Tensor:
        """Return the histogram of a backward pass without changing `.grad`."""
        wide = torch.promote_types(loss.dtype, torch.float32)
        with torch.enable_grad():
            scaled = (loss.to(wide) * scale.to(loss.device)).sum()
        grads = torch.autograd.grad(
            scaled, leaves, retain_graph=True, allow_unused=True
        )
        self._count_gradients(grads)  # no node receives those of 16-bit leaves
        return self._pop_histogram(scale)

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> Tensor | None:
        """Propose the measured scale, if a measurement was due."""
        del gradients, found_inf
        self._in_step = False
        if not self._hook_handles:
            return None
        while self._hook_handles:
            self._hook_handles.pop().remove()
        histogram = self._pop_histogram(state.scale)
        safe = largest_safe_scale(histogram, torch.float16, self._margin)
        self._recent.append(torch.where(safe.isnan(), state.scale, safe))
        recent = [safe.to(state.scale.device) for safe in self._recent]
        return torch.stack(recent).amin()

    def on_found_inf(self, state: ScaleState, found_inf: Tensor) -> None:
        """Lower the last measurement if its scale overflowed, on any rank."""
        if self._recent:
            lower = state.scale * 2.0 ** (-1 - self._margin)
            overflowed = found_inf.to(lower.device) > 0
            last = self._recent[-1].to(lower.device)
            self._recent[-1] = torch.where(overflowed, torch.minimum(last, lower), last)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the last measurements. Synchronizes."""
        return {"steps": self._steps, "recent": [float(safe) for safe in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; only {} leads to new trials."""
        self._steps, self._in_step = int(state.get("steps", 0)), False
        recent = [torch.tensor(safe) for safe in state.get("recent", [])]
        self._recent = deque(recent, maxlen=_NUM_RECENT)


def _is_repeatable(node: Node) -> bool:
    """Return whether a node's backward can run more than once."""
    in_python = isinstance(node, BackwardCFunction)
    return not in_python or getattr(node, "repeatable", False) is True


ScaleStrategy: TypeAlias = LogMaxStrategy | MeasuredStrategy
"""Observes losses and gradients, and proposes a scale."""


def make_strategy(
    name: str, group: dist.ProcessGroup | None = None
) -> ScaleStrategy | None:
    """Return a new strategy of a name; None for "backoff", which proposes nothing."""
    if name == "measured":
        return MeasuredStrategy(group=group)
    return LogMaxStrategy(group=group) if name == "logmax" else None

"""Strategies that propose a loss scale: measured, logmax, or none.

In: each loss before its backward pass, and the unscaled gradients after it. Out: the
scale that a strategy asks for, or None; `advance` has the last word.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from halfstep._torch.async_read import to_device_async
from halfstep.errors import UserError, require
from halfstep.numerics.exponents import (
    BINS,
    count_exponents,
    largest_magnitude,
    largest_safe_scale,
    power_of_two,
    unscale_histogram,
)
from halfstep.numerics.formats import is_low
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
"""Looks that count: gradients differ from batch to batch by more than a margin of 2."""

_MAX_TRIALS = 12
"""Backward passes of a trial: mostly two; down to 2**-22 where gradients are huge."""

_MAX_TRIAL_SCALE = 2.0**24
"""Where all is zero at this scale, it is so at any."""


class ScaleStrategy(Protocol):
    """Observes losses and gradients, and proposes a scale."""

    name: str
    """The word that `strategy` knows it by."""

    def on_loss(self, loss: Tensor, state: ScaleState) -> Tensor | None:
        """Observe an unscaled loss; return the scale to begin with, or None."""

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> Tensor | None:
        """Return the scale for the next step, a power of two, or None.

        Args:
            gradients: Unscaled; of several optimizers in several calls, the lowest of
                whose answers counts.
            state: The state under which the backward passes ran.
            found_inf: Not zero if a gradient held inf or NaN. Shape ().
        """

    def on_found_inf(self, state: ScaleState, found_inf: Tensor) -> None:
        """Record what the ranks agreed on, just before the scale moves."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from. May wait for the device."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; {} begins anew."""


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


class MeasuredStrategy:
    """Asks for the largest scale at which no 16-bit gradient overflows.

    Why: growth and back-off find that scale by losing steps, and look for it again
    after each growth. The overflow that costs a step mostly happens inside the
    network, in the gradients of activations: those of parameters, fp32 under autocast,
    do not show it. So a backward pass is watched at each node of its graph. One look
    is one batch: the lowest of the last ten counts, and so does a step that overflowed.

    The first step makes a trial before anything is lost: it runs the backward pass at
    some scales without touching `.grad`, and waits for the device. The random state is
    put back; hooks of tensors fire, those of DDP do not. A graph with a backward pass
    written in Python is not tried, for it may be good for one pass only (compiled code,
    reentrant checkpoints, fused losses): the first step then runs at the rule's
    own scale, and is watched. A function that can be run again says so by setting
    `ctx.repeatable = True`. Gradients inside such a node are never seen.

    Args:
        every: Steps from one look to the next, >= 1. Gradients drift over hundreds of
            steps, and a look costs a pass over all of them: 100. Losses with optimizers
            of their own take turns as steps; of two, an odd number sees both.
        low: Format whose gradients may overflow. bf16 reaches as far as fp32.
        margin: Powers of two to stay away from overflow, >= 0: `largest_safe_scale`.
        group: Ranks that look together; default all. Each has to come to each look.

    Raises:
        UserError: If a number is out of its range.
    """

    name = "measured"

    def __init__(
        self,
        every: int = 100,
        low: torch.dtype = torch.float16,
        margin: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require("every", every, every >= 1, "at least 1")
        require("low", low, is_low(low), "torch.float16 or torch.bfloat16")
        require("margin", margin, margin >= 0, "at least 0")
        self._every, self._low = every, low
        self._margin, self._group = margin, group
        self._steps, self._in_step = 0, False
        self._hook_handles: list[RemovableHandle] = []
        self._counts: dict[torch.device, Tensor] = {}
        self._recent: deque[Tensor] = deque(maxlen=_NUM_RECENT)

    def on_loss(self, loss: Tensor, state: ScaleState) -> Tensor | None:
        """Tap the graph if a look is due; try the first one of all."""
        if loss.grad_fn is None:
            return None
        first = self._steps == 0
        if not self._in_step:
            self._steps, self._in_step = self._steps + 1, True
        if (self._steps - 1) % self._every:
            return None
        nodes = nodes_of(loss.grad_fn)
        self._hook_handles += [
            node.register_prehook(self._count_gradients) for node in nodes
        ]
        return self._find_first_scale(loss, nodes, state) if first else None

    def _count_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Count what comes to a node of a backward pass."""
        for gradient in gradients:
            if gradient is not None and gradient.dtype == self._low:
                # One histogram a device: each has an autograd thread of its own.
                before = self._counts.get(gradient.device, 0)
                self._counts[gradient.device] = before + count_exponents(gradient)

    def _pop_histogram(self, scale: Tensor) -> Tensor:
        """Return what all ranks counted, unscaled, and begin anew."""
        total = torch.zeros(BINS, dtype=torch.int64, device=scale.device)
        while self._counts:
            total += self._counts.popitem()[1].to(total.device)
        return unscale_histogram(
            reduce_over_ranks(total, dist.ReduceOp.SUM, self._group), scale
        )

    def _find_first_scale(
        self, loss: Tensor, nodes: Sequence[Node], state: ScaleState
    ) -> Tensor | None:
        """Return the scale at which a loss can safely begin, by trying.

        Each pass proposes the next, until one is proposed that was tried: what flowed
        at it is then known, and not concluded from what a lower scale left of it.
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
                safe = largest_safe_scale(histogram, self._low, self._margin).item()
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
        """Return the histogram of a backward pass that leaves nothing behind."""
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
        """Ask for what was measured, if a look was due."""
        del gradients, found_inf
        self._in_step = False
        if not self._hook_handles:
            return None
        while self._hook_handles:
            self._hook_handles.pop().remove()
        histogram = self._pop_histogram(state.scale)
        safe = largest_safe_scale(histogram, self._low, self._margin)
        self._recent.append(torch.where(safe.isnan(), state.scale, safe))
        recent = [safe.to(state.scale.device) for safe in self._recent]
        return torch.stack(recent).amin()

    def on_found_inf(self, state: ScaleState, found_inf: Tensor) -> None:
        """Remember that a scale was too large, as long as the last look counts."""
        if self._recent:
            lower = state.scale * 2.0 ** (-1 - self._margin)
            overflowed = found_inf.to(lower.device) > 0
            last = self._recent[-1].to(lower.device)
            self._recent[-1] = torch.where(overflowed, torch.minimum(last, lower), last)

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps have begun, and what they saw. Waits for the device."""
        return {"steps": self._steps, "recent": [float(safe) for safe in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; only {} leads to another trial."""
        self._steps, self._in_step = int(state.get("steps", 0)), False
        recent = [torch.tensor(safe) for safe in state.get("recent", [])]
        self._recent = deque(recent, maxlen=_NUM_RECENT)


def nodes_of(root: Node) -> list[Node]:
    """Return all nodes of a graph, in no order."""
    nodes, pending = {root}, [root]
    while pending:
        next_nodes = {node for node, _ in pending.pop().next_functions if node} - nodes
        nodes |= next_nodes
        pending += next_nodes
    return list(nodes)


def _is_repeatable(node: Node) -> bool:
    """Say whether a backward pass through a node can be run more than once."""
    in_python = isinstance(node, BackwardCFunction)
    return not in_python or getattr(node, "repeatable", False) is True


def make_strategy(
    name: str, group: dist.ProcessGroup | None = None
) -> ScaleStrategy | None:
    """Return a new strategy; None for "backoff", which asks for nothing.

    Args:
        name: "backoff", "measured" or "logmax".
        group: Ranks that must agree on a scale; default all.

    Raises:
        UserError: If no strategy has that name.
    """
    if name == "measured":
        return MeasuredStrategy(group=group)
    if name == "logmax":
        return LogMaxStrategy(group=group)
    if name != "backoff":
        message = (
            f"strategy={name!r} is unknown; choose one of backoff, measured, logmax."
        )
        raise UserError(message)
    return None

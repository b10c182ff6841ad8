"""A loss scale from a measurement of all 16-bit gradients.

In: the graph of a loss, and what flows through it. Out: the largest safe scale.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from halfstep.errors import require
from halfstep.numerics.exponents import (
    BINS,
    count_exponents,
    largest_safe_scale,
    unscale_histogram,
)
from halfstep.numerics.formats import is_low
from halfstep.scaling.unscale import reduce_over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from halfstep.scaling.loss_scale import ScaleState

_NUM_RECENT = 10
"""Looks that count: gradients differ from batch to batch by more than a margin of 2."""

_MAX_TRIALS = 12
"""Backward passes of a trial: mostly two; down to 2**-22 where gradients are huge."""

_MAX_TRIAL_SCALE = 2.0**24
"""Where all is zero at this scale, it is so at any."""


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

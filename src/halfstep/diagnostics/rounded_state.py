"""Finds fp32 weights and optimizer moments that were rounded to a 16-bit format.

If every value of a weight is exactly representable in 16 bits, the weight was rounded:
of fp32 values that never were, about one in 8,192 is representable in fp16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep._torch.optimizer_params import named_parameters
from halfstep.nonfinite.optimizer_eps import CURE, eps_underflows
from halfstep.numerics import formats
from halfstep.reporting.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from halfstep.reporting.finding import Severity

RULE = "rounded state"
_FEW = 8
"""Tensors with fewer values are ignored: they may be representable by chance."""
_LOST_MOMENTS = 0.01
"""Share of second moments that may be 0 where the first moment is not."""


class RoundedState:
    """Checks weights and optimizer state before updates; `say` gets the findings."""

    def __init__(self, say: Callable[[Finding], None]) -> None:
        self._say = say
        self._before: dict[Optimizer, list[Tensor]] = {}
        """Copies of each optimizer's weights before its first observed update."""

    def _add(
        self, where: str, measured: str, advice: str, severity: Severity = "error"
    ) -> None:
        source = "its numbers"
        self._say(Finding(severity, RULE, where, measured, "", source, advice, 0.7))

    @torch.no_grad()
    def on_update(self, optimizer: Optimizer) -> None:
        """Check weights, moments, eps and weight decay before an update."""
        named = [each for each in named_parameters(optimizer) if _is_full(each[1])]
        now = [param.detach().clone() for _, param in named]
        before = self._before.setdefault(optimizer, now)
        dtype = _dtype_of(now)
        if dtype is not None:
            word, name = formats.word(dtype), named[0][0]
            if before is now:
                self._add(
                    name,
                    f"{word} represents all weights exactly: they were rounded to "
                    f"{word} in a checkpoint, or by a cast and back",
                    "Save the float32 weights: model.state_dict() of O1, "
                    "session.state_dict() of O2.",
                    "note",
                )
            elif not all(map(torch.equal, before, now)):
                self._add(
                    name,
                    f"weights were cast to {word} and back in the step: what an "
                    "update adds below its precision is lost",
                    "Validate under autocast, or cast a copy: "
                    "copy.deepcopy(model).half().",
                )
        self._check_moments(optimizer)
        for each in eps_underflows(optimizer):
            self._add(each.optimizer, str(each), f"Use {CURE}.")
        self._check_decay(optimizer)

    def _check_decay(self, optimizer: Optimizer) -> None:
        """Report weight decay whose factor rounds to 1 in the dtype of the weights."""
        for number, group in enumerate(optimizer.param_groups):
            decay = float(group.get("lr", 0.0)) * group.get("weight_decay", 0.0)
            # Fused kernels apply decay and update in fp32 and round once.
            if not group.get("decoupled_weight_decay") or group.get("fused"):
                continue
            for dtype in filter(formats.is_low, {p.dtype for p in group["params"]}):
                if 0 < decay < torch.finfo(dtype).eps / 4:
                    self._add(
                        f"parameter group {number}",
                        f"weight decay has no effect in {formats.word(dtype)}: "
                        f"1 - lr * weight_decay = 1 - {decay:.1g} is rounded to 1",
                        "Keep weights or master weights in float32 (level O2).",
                        "note",
                    )

    def _check_moments(self, optimizer: Optimizer) -> None:
        """Report second moments that became 0: the next update is lr * m / eps."""
        num_lost, count, first = 0, 0, ""
        for name, param in named_parameters(optimizer):
            state = optimizer.state.get(param, {})
            mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
            if isinstance(mean, Tensor) and isinstance(square, Tensor):
                lost = int(((square == 0) & (mean != 0)).sum())
                num_lost, count = num_lost + lost, count + mean.numel()
                first = first or (name if lost else "")
        if num_lost > _LOST_MOMENTS * max(1, count):
            self._add(
                first,
                f"exp_avg_sq is 0 where exp_avg is not, at {num_lost} of {count} "
                "places: it was kept or saved in float16, and the next update is "
                "exp_avg / eps",
                "Keep the optimizer's state in float32 (weights in float32 and "
                "autocast, or O2), and save it so; this state is lost.",
            )


def _is_full(param: Tensor) -> bool:
    dense = type(param.data) is Tensor and param.layout == torch.strided
    return dense and param.dtype == torch.float32 and param.numel() >= _FEW


def _dtype_of(weights: list[Tensor]) -> torch.dtype | None:
    """Return the 16-bit dtype that represents all weights exactly, or None.

    Constant weights, such as a norm's ones, are ignored.
    """
    varied = [each for each in weights if bool((each != each.flatten()[0]).any())]
    for dtype in (torch.bfloat16, torch.float16):
        if varied and all(torch.equal(each, each.to(dtype).float()) for each in varied):
            return dtype
    return None

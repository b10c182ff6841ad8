"""Resolves the level and dtype to train with; "auto" measures the machine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.nonfinite.graph import nodes_of
from halfstep.nonfinite.optimizer_eps import eps_underflows
from halfstep.numerics import formats
from halfstep.policy import levels

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor


SMALL_MODEL = 100_000
"""Parameters from which the fused update of a session saves time by itself."""
OVERHEAD = 2e-4
"""Seconds that casts and checks add to a step of a few layers, on one core: a step of
README's first example took 0.61 ms in fp32 and 0.81 ms at O2."""


@dataclass(frozen=True)
class Choice:
    """A level and a format to train with, and the reason for both."""

    level: levels.Level
    """The chosen level."""
    format: formats.FloatFormat
    """The 16-bit format; fp32 at O0."""
    reason: str
    """Why it was chosen."""
    by_machine: bool = False
    """The machine alone decided, and knows nothing of the model."""

    def __str__(self) -> str:
        """Return level and format as written in flags."""
        return f"{self.level} {self.format}"


def resolve(
    level: str | levels.Level,
    dtype: str | torch.dtype | formats.FloatFormat,
    device: str,
) -> Choice:
    """Resolve names to a level and a format; "auto" measures the machine.

    Args:
        level: "O0" to "O3" or "auto".
        dtype: "fp32", "bf16", "fp16" or "auto". With O0 it has no effect.
        device: "cpu", "cuda", "mps" or "xpu".

    Raises:
        UserError: If a name is unknown, or level and dtype contradict each other.
    """
    fixed = None if dtype == "auto" else formats.parse(dtype)
    if level == "auto":
        if fixed is None:
            advice = hardware.recommend(device)
            format_ = formats.parse(advice.dtype)
            level_ = levels.parse(advice.level)
            return Choice(level_, format_, advice.reason, by_machine=True)
        chosen_level = levels.O0 if fixed is formats.FP32 else levels.O2
        return Choice(chosen_level, fixed, f"dtype {fixed} was asked for")
    chosen_level = levels.parse(level)
    reason = f"level {level} was asked for"
    if not chosen_level.low:
        if fixed not in (None, formats.FP32):
            # Accepted, so that a sweep over levels only changes one argument.
            reason += (
                f"; dtype={fixed} has no effect: {chosen_level} is fp32 throughout"
            )
        return Choice(chosen_level, formats.FP32, reason)
    if fixed is formats.FP32:
        raise UserError(
            f"level={level} needs dtype bf16 or fp16; fp32 training is level O0."
        )
    if fixed is None:
        fp16 = device == "cuda" and not hardware.native("bf16", device)
        fixed = formats.FP16 if fp16 else formats.BF16
    return Choice(chosen_level, fixed, reason)


def small_model_note(choice: Choice, params: Collection[Tensor], loss: Tensor) -> str:
    """Return a line if the machine chose 16 bits and the model is too small, or "".

    `params` are the model's; the graph of `loss` tells the size of a batch.
    """
    numel = sum(param.numel() for param in params)
    if not choice.by_machine or not choice.level.low or numel >= SMALL_MODEL:
        return ""
    rates = hardware.gemm_rates(loss.device.type)
    time = 3 * _forward_flops(loss) / rates["fp32"] * 1e-12
    if time * (1 - rates["fp32"] / rates[choice.format.name]) >= OVERHEAD:
        return ""
    return (
        f"level='auto' chose {choice} for this machine, but the matmuls of this model "
        f"take only {time * 1e6:.3g} us of a step in fp32, and casts and checks "
        f"about {OVERHEAD * 1e6:g} us: level='O0' is likely faster."
    )


def _forward_flops(loss: Tensor) -> float:
    """Return the operations of matmuls and convolutions with weights, by their shapes.

    Of all nodes that use a weight: a few others are counted that take less.
    """
    total = 0.0
    for node in nodes_of(loss.grad_fn):
        if _IS_SAME_WEIGHT.match(node.name()) or node.name().startswith("Embedding"):
            continue
        shapes = [each.shape for each in node._input_metadata]  # noqa: SLF001
        numel = max(map(math.prod, shapes), default=0)
        for weight in (_weight_of(edge[0]) for edge in node.next_functions):
            if weight is not None and weight.dim() > 1:
                total += 2 * weight.numel() * numel / weight.shape[0]
    return total


def _weight_of(node: Any) -> Tensor | None:  # noqa: ANN401 -- a node of autograd
    """Return the weight that a node passes on, as it is or cast, if it does."""
    while node is not None and _IS_SAME_WEIGHT.match(node.name()):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


_IS_SAME_WEIGHT = re.compile("(T|Transpose|Permute|ToCopy|_CachedCast)Backward")


def warnings_for(
    choice: Choice, optimizer: torch.optim.Optimizer, device: str, *, masters: bool
) -> list[str]:
    """Return warnings about a choice that the user made, one line each."""
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    warnings = [
        hardware.emulation_warning(choice.format.name, device),
        weight_nan_warning(choice, optimizer, masters=masters),
        float64_warning(choice, dtypes),
    ]
    return [line for line in warnings if line]


def float64_warning(choice: Choice, dtypes: set[torch.dtype]) -> str:
    """Return a warning if all weights are float64, which no level casts, or ""."""
    if not choice.level.low or dtypes != {torch.float64}:
        return ""
    cure = "call model.float() before you make the optimizer."
    return f"the weights are float64, which no level casts: {cure}"


def weight_nan_warning(
    choice: Choice, optimizer: torch.optim.Optimizer, *, masters: bool
) -> str:
    """Return a warning if weights will become NaN whatever the data, or "".

    The optimizer's epsilon may round to zero in 16-bit state; with `masters` the state
    is fp32.
    """
    if not choice.level.low_weights or masters:
        return ""
    for underflow in eps_underflows(optimizer, choice.format.dtype):
        what, end = "is all that an update divides by if v is 0", "overflow"
        if underflow.is_zero:
            what, end = "rounds to 0", "become NaN"
        return (
            f"eps={underflow.eps:g} {what} in {choice.format}, in which level "
            f"{choice.level} keeps the optimizer's state: weights will {end}. "
            f"Use eps={choice.format.min_normal:.1e}, or level O2."
        )
    return ""

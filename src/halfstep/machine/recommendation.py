"""Resolves the level and dtype to train with; "auto" measures the machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.nonfinite.optimizer_eps import eps_underflows
from halfstep.numerics import formats
from halfstep.policy import levels


@dataclass(frozen=True)
class Choice:
    """A level and a format to train with, and the reason for both."""

    level: levels.Level
    """The chosen level."""
    format: formats.FloatFormat
    """The 16-bit format; fp32 at O0."""
    reason: str
    """Why it was chosen."""

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
            return Choice(levels.parse(advice.level), format_, advice.reason)
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

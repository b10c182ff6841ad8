"""Defines the loss scale's rule and state, and `advance`, the update after a step.

A constant scale and no scale are rules with factors of 1, without special cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._torch import async_read
from halfstep.errors import UserError, format_value, require, to_float

REFILLS = ("growth", "clean")
STRATEGIES = ("backoff", "measured", "logmax")

_TINY, FP32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def is_power_of_two(number: float) -> bool:
    """Return whether a number is a power of two: multiplying by it is exact."""
    return math.frexp(number)[0] == 0.5  # noqa: PLR2004 -- frexp's mantissa


@dataclass(frozen=True)
class ScaleRule:
    """How the loss scale changes after each step; factors of 1 keep it constant.

    Raises:
        UserError: If a number is out of its range.

    Example:
        >>> ScaleRule.parse("dynamic").growth_interval
        2000
        >>> ScaleRule.parse(1024).scales
        True
    """

    init_scale: float = 2.0**16
    """First scale. A power of two, so that unscaling is exact; 2**16 as in torch."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` clean steps, >= 1."""
    backoff_factor: float = 0.5
    """Factor after an overflow, above 0 and at most 1."""
    growth_interval: int = 2000
    """Consecutive steps without overflow before the scale grows, >= 1. With 2000, the
    search for a larger scale skips at most one step in 2001."""
    min_scale: float = 1.0
    """Smallest scale, at least the smallest normal fp32 number: below it, 1 / scale is
    inf. Below 1, unscaling multiplies gradients and can itself overflow."""
    max_scale: float = 2.0**24
    """Largest scale, at most the largest fp32 number; 2**24 as in apex."""
    hysteresis: int = 1
    """Overflows until the scale is reduced, >= 1. After that, each overflow reduces it,
    until the count is reset."""
    refill: str = "growth"
    """What resets the hysteresis: only "growth" of the scale, as in Megatron; or each
    "clean" step, so that only consecutive overflows count, as DeepSpeed's
    consecutive_hysteresis."""
    max_consecutive_skips: int | None = 50
    """Consecutive skips after which training stops with `LossScaleCollapse`; None: no
    limit."""
    strategy: str = "backoff"
    """How the scale is chosen: "backoff" grows it and backs off; "measured" (histogram
    of the gradients) and "logmax" (statistics of the largest) compute it."""

    def __post_init__(self) -> None:
        growing = 1 <= self.growth_factor <= FP32_MAX
        self._check("growth_factor", growing, "finite and at least 1")
        self._check("backoff_factor", 0 < self.backoff_factor <= 1, "in (0, 1]")
        self._check("growth_interval", self.growth_interval >= 1, "at least 1")
        self._check("min_scale", self.min_scale >= _TINY, f"at least {_TINY:g}")
        bounded = self.min_scale <= self.max_scale <= FP32_MAX
        self._check("max_scale", bounded, f"between min_scale and {FP32_MAX:g}")
        within = self.min_scale <= self.init_scale <= self.max_scale
        self._check("init_scale", within, "between min_scale and max_scale")
        self._check("hysteresis", self.hysteresis >= 1, "at least 1")
        self._check("refill", self.refill in REFILLS, f"one of {REFILLS}")
        self._check("strategy", self.strategy in STRATEGIES, f"one of {STRATEGIES}")
        exact = self.strategy == "backoff" or is_power_of_two(self.init_scale)
        self._check("init_scale", exact, f"a power of two for {self.strategy}")
        limit = self.max_consecutive_skips
        self._check("max_consecutive_skips", limit is None or limit >= 1, "at least 1")

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        require(name, getattr(self, name), is_valid, expected)

    @property
    def scales(self) -> bool:
        """Whether the scale can differ from 1."""
        return self.init_scale != 1 or self.backoff_factor != 1

    @classmethod
    def parse(cls, word: str | float) -> ScaleRule:
        """Return the rule for a string or a number.

        Args:
            word: "dynamic" (or "backoff"), "measured", "logmax", "none" for a scale of
                1, or a positive number for a constant scale.

        Raises:
            UserError: If it is none of these.
        """
        if isinstance(word, str) and word in {"dynamic", "backoff"}:
            return cls()
        if isinstance(word, str) and word in STRATEGIES:
            return cls(growth_factor=1.0, strategy=word)
        try:
            scale = float(word) if isinstance(word, str) else to_float(word)
        except ValueError:
            scale = 1.0 if word == "none" else math.nan
        if not _TINY <= scale <= FP32_MAX:
            message = (
                f"loss_scale={format_value(word)} is not a scale; "
                "choose auto, dynamic, "
                "measured, logmax, none or a positive number such as 1024."
            )
            raise UserError(message)
        return cls(scale, 1.0, 1.0, min_scale=scale, max_scale=scale)


@dataclass(frozen=True)
class ScaleState:
    """The loss scale and its counters, each a tensor of shape () on one device.

    Example:
        >>> ScaleState.first(ScaleRule()).scale
        tensor(65536.)
    """

    scale: Tensor
    """float32."""
    clean_steps: Tensor
    """int32: steps without overflow since the scale last moved."""
    hysteresis_left: Tensor
    """int32: overflows until the next backoff; at 1 or less, each one backs off."""
    skips_in_a_row: Tensor
    """int32: overflows since the last clean step."""

    @classmethod
    def first(cls, rule: ScaleRule, device: torch.device | str = "cpu") -> ScaleState:
        """Return the state before the first step."""
        return cls(
            scale=torch.tensor(rule.init_scale, dtype=torch.float32, device=device),
            clean_steps=torch.tensor(0, dtype=torch.int32, device=device),
            hysteresis_left=torch.tensor(
                rule.hysteresis, dtype=torch.int32, device=device
            ),
            skips_in_a_row=torch.tensor(0, dtype=torch.int32, device=device),
        )


def advance(
    state: ScaleState,
    found_inf: Tensor,
    rule: ScaleRule,
    proposal: Tensor | None = None,
) -> ScaleState:
    """Return the state after a step that did or did not overflow.

    It does not synchronize: the rule is a few selections on the device.

    With s the scale, c the clean steps, h the hysteresis left, and s' the next s::

        overflow, h > 1          s' = s                         c' = 0       h' = h - 1
        overflow, h <= 1         s' = max(s * backoff, floor)   c' = 0       h' = h - 1
        clean, c + 1 >= window   s' = min(s * growth, ceiling)  c' = 0       h' = full
        clean                    s' = s                         c' = c + 1   h' = h

    With refill "clean", h' = full in the last line too. A proposal p replaces s' of
    both clean lines, and of the second if lower: s' = min(max(p, floor), ceiling).

    Growth needs "at least" `growth_interval` clean steps, not "exactly" as in torch: an
    interval that is shortened during a run would otherwise end growth.

    Args:
        state: Before the step; not changed.
        found_inf: Non-zero if a gradient on any rank held inf or NaN. Shape ().
        rule: Factors, interval and bounds.
        proposal: The scale that a strategy computed, float32, shape (), or None.

    Example:
        >>> rule = ScaleRule(init_scale=8.0, growth_interval=2)
        >>> state = ScaleState.first(rule)
        >>> for flag in (0.0, 1.0, 0.0, 0.0):
        ...     state = advance(state, torch.tensor(flag), rule)
        ...     print(state.scale.item(), state.clean_steps.item())
        8.0 1
        4.0 0
        4.0 1
        8.0 0

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018: why to scale.
        torch.amp.GradScaler: growth and back-off. Megatron-LM: hysteresis.
    """
    if async_read.is_cpu(state.scale.device):
        # Reading is free, and thirty tensor operations on one number cost more than
        # checking a thousand gradients.
        return _advance_on_host(state, bool(found_inf), rule, proposal)
    overflowed = found_inf.to(state.scale.device) > 0
    # In double and rounded once, as in torch's kernel; MPS has no double.
    scale = state.scale if state.scale.is_mps else state.scale.double()
    left = state.hysteresis_left - overflowed.int()
    clean = torch.where(overflowed, 0, state.clean_steps + 1)
    grow = clean >= rule.growth_interval
    lower = (scale * rule.backoff_factor).clamp(min=rule.min_scale)
    if proposal is None:
        higher = scale * rule.growth_factor
        # As in torch, the scale does not grow beyond fp32. A loaded scale may be below
        # the minimum or above the maximum.
        grown = torch.maximum(higher.clamp(max=rule.max_scale), scale)
        clean_scale = torch.where(grow & (higher <= FP32_MAX), grown, scale)
    else:
        clean_scale = proposal.to(scale).clamp(rule.min_scale, rule.max_scale)
        lower = torch.minimum(lower, clean_scale)
    lower = torch.where(left <= 0, torch.minimum(lower, scale), scale)
    refilled = ~overflowed if rule.refill == "clean" else grow
    return ScaleState(
        torch.where(overflowed, lower, clean_scale).float(),
        torch.where(grow, 0, clean).to(torch.int32),
        torch.where(refilled, rule.hysteresis, left).to(torch.int32),
        torch.where(overflowed, state.skips_in_a_row + 1, 0).to(torch.int32),
    )


def _advance_on_host(
    state: ScaleState, overflowed: bool, rule: ScaleRule, proposal: Tensor | None
) -> ScaleState:
    """Do the same with Python numbers; unchanged tensors are reused."""
    scale, skips = state.scale.item(), state.skips_in_a_row
    if not overflowed:
        clean = state.clean_steps.item() + 1
        grow = clean >= rule.growth_interval
        next_scale, left = scale, state.hysteresis_left
        if proposal is not None:
            next_scale = min(max(proposal.item(), rule.min_scale), rule.max_scale)
        elif grow and scale * rule.growth_factor <= FP32_MAX:
            next_scale = max(min(scale * rule.growth_factor, rule.max_scale), scale)
        if (grow or rule.refill == "clean") and left.item() != rule.hysteresis:
            left = left.new_tensor(rule.hysteresis)
        if skips.item():
            skips = skips.new_tensor(0)
        clean = 0 if grow else clean
    else:
        clean, next_scale = 0, scale
        left = state.hysteresis_left - 1
        if left.item() <= 0:
            next_scale = min(max(scale * rule.backoff_factor, rule.min_scale), scale)
            if proposal is not None:
                proposed = min(max(proposal.item(), rule.min_scale), rule.max_scale)
                next_scale = min(next_scale, proposed)
        skips = skips + 1
    return ScaleState(
        state.scale if next_scale == scale else state.scale.new_tensor(next_scale),
        state.clean_steps.new_tensor(clean),
        left,
        skips,
    )

"""Defines the loss scale's rule and state; `loss_scaler.advance` applies the rule.

A constant scale and no scale are rules with factors of 1, without special cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from halfstep.errors import UserError, format_value, require, to_float

REFILLS = ("growth", "clean")

_TINY, FP32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


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
        limit = self.max_consecutive_skips
        self._check("max_consecutive_skips", limit is None or limit >= 1, "at least 1")

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        require(name, getattr(self, name), is_valid, expected)

    @property
    def scales(self) -> bool:
        """Whether the scale can differ from 1."""
        return {self.init_scale, self.growth_factor, self.backoff_factor} != {1}

    @classmethod
    def parse(cls, word: str | float) -> ScaleRule:
        """Return the rule for a string or a number.

        Args:
            word: "dynamic", "none" for a scale of 1, or a positive number for a
                constant scale.

        Raises:
            UserError: If it is none of these.
        """
        if word == "dynamic":
            return cls()
        try:
            scale = float(word) if isinstance(word, str) else to_float(word)
        except ValueError:
            scale = 1.0 if word == "none" else math.nan
        if not _TINY <= scale <= FP32_MAX:
            raise UserError(
                f"loss_scale={format_value(word)} is not a scale; choose auto, "
                "dynamic, none or a positive number such as 1024."
            )
        return cls(scale, 1.0, 1.0, min_scale=scale, max_scale=scale)


def check_scale(name: str, value: object) -> None:
    """Raise `UserError` for a loaded loss scale that is no positive fp32 number."""
    is_valid = _TINY <= to_float(value) <= FP32_MAX
    require(name, value, is_valid, f"a number from {_TINY:g} to {FP32_MAX:g}")


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
    """float32, as found_inf: overflows since the last clean step."""

    @classmethod
    def first(cls, rule: ScaleRule, device: torch.device | str = "cpu") -> ScaleState:
        """Return the state before the first step."""
        scale = torch.tensor(rule.init_scale, dtype=torch.float32, device=device)
        count = partial(torch.tensor, dtype=torch.int32, device=device)
        return cls(scale, count(0), count(rule.hysteresis), torch.zeros_like(scale))

    def copy_(self, other: ScaleState) -> ScaleState:
        """Copy the values of another state into the tensors of this one; return it."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))
        return self

"""Loss scaling: a pure rule, and a scaler that works on lists of tensors.

In: a loss, gradients, and one `found_inf` flag a step. Out: a scaled loss, unscaled
gradients, and the state for the next step. Static scaling and none at all are the same
rule with factors of one, so nobody branches on "off".
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

FLOOR_PATIENCE = 10
"""Skips in a row after which a scale that lies at its floor is given up: one bad batch
must not end a run, and a lower scale is not to be had."""


_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LossScaleCollapse(RuntimeError):  # noqa: N818 -- a public name of the API
    """Every step overflows and no smaller scale is left to try."""


@dataclass(frozen=True)
class ScaleRule:
    """How the loss scale moves; factors of 1 keep it where it is.

    Raises:
        UserError: If a number is out of its range.
    """

    init_scale: float = 2.0**16
    """First scale. A power of two, so that unscaling is exact; 2**16 as in torch."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` clean steps, >= 1."""
    backoff_factor: float = 0.5
    """Factor after an overflow, above 0 and at most 1."""
    growth_interval: int = 2000
    """Clean steps in a row before growth, >= 1: at most one step in 2001 is lost."""
    min_scale: float = 1.0
    """Floor, fp32's smallest normal number or more: below it, one over the scale is
    inf. Below 1, unscaling multiplies and can itself overflow."""
    max_scale: float = 2.0**24
    """Ceiling, at most fp32's largest number; 2**24 as in apex."""
    hysteresis: int = 1
    """Overflows to bear before each back-off, >= 1; growth refills them."""
    max_consecutive_skips: int | None = 50
    """Skips in a row after which training stops; None never stops it for that."""

    def __post_init__(self) -> None:
        self._check("growth_factor", self.growth_factor >= 1, "at least 1")
        self._check("backoff_factor", 0 < self.backoff_factor <= 1, "in (0, 1]")
        self._check("growth_interval", self.growth_interval >= 1, "at least 1")
        self._check("min_scale", self.min_scale >= _TINY, f"at least {_TINY:g}")
        bounded = self.min_scale <= self.max_scale <= _HUGE
        self._check("max_scale", bounded, f"between min_scale and {_HUGE:g}")
        within = self.min_scale <= self.init_scale <= self.max_scale
        self._check("init_scale", within, "between min_scale and max_scale")
        self._check("hysteresis", self.hysteresis >= 1, "at least 1")
        limit = self.max_consecutive_skips
        self._check("max_consecutive_skips", limit is None or limit >= 1, "at least 1")

    def _check(self, name: str, good: bool, right: str) -> None:
        if not good:
            message = f"{name}={getattr(self, name)} must be {right}."
            raise UserError(message)

    @classmethod
    def parse(cls, word: str | float) -> ScaleRule:
        """Return the rule for "dynamic", "none", or a static scale.

        Raises:
            UserError: If the word is neither of them nor a positive number.
        """
        if word == "dynamic":
            return cls()
        try:
            scale = 1.0 if word == "none" else float(word)
        except ValueError:
            scale = math.nan
        if not _TINY <= scale <= _HUGE:
            message = (
                f"loss_scale={word!r} is not a scale; choose auto, dynamic, none or "
                "a positive number such as 1024."
            )
            raise UserError(message)
        return cls(scale, 1.0, 1.0, min_scale=scale, max_scale=scale)


@dataclass(frozen=True)
class ScaleState:
    """The loss scale and its counters; each is a tensor of shape () on one device."""

    scale: Tensor
    """float32."""
    clean_steps: Tensor
    """int32: steps without overflow since the scale last moved."""
    hysteresis_left: Tensor
    """int32: overflows to bear before the next back-off."""
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


def advance(state: ScaleState, found_inf: Tensor, rule: ScaleRule) -> ScaleState:
    """Return the state after a step that did or did not overflow.

    Why: asking `if found_inf:` on the host waits for the device at every step. Here
    the rule is a few selections on the device.

    Formula (s scale, c clean steps, h hysteresis left; ' marks the next state):

        overflow, h > 1          s' = s                         c' = 0       h' = h - 1
        overflow, h <= 1         s' = max(s * backoff, floor)   c' = 0       h' = h - 1
        clean, c + 1 >= window   s' = min(s * growth, ceiling)  c' = 0       h' = full
        clean                    s' = s                         c' = c + 1   h' = h

    Growth asks "at least", not "equal" as torch does: a window that is made shorter
    in mid-run must not stop growth for ever.

    Args:
        state: Before the step; unchanged.
        found_inf: Not zero if a gradient on any rank held inf or NaN. Shape ().
        rule: Factors, window and bounds.

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
    bad = found_inf.to(state.scale.device) > 0
    left = torch.where(bad, state.hysteresis_left - 1, state.hysteresis_left)
    clean = torch.where(bad, 0, state.clean_steps + 1)
    grow = clean >= rule.growth_interval
    # In double and rounded once, as torch's kernel does it.
    scale = state.scale.double()
    lower = (scale * rule.backoff_factor).clamp(min=rule.min_scale).float()
    higher = (scale * rule.growth_factor).clamp(max=rule.max_scale).float()
    # A start below the floor or above the ceiling is possible after a load.
    kept = torch.where(grow, torch.maximum(higher, state.scale), state.scale)
    return ScaleState(
        scale=torch.where(bad & (left <= 0), torch.minimum(lower, state.scale), kept),
        clean_steps=torch.where(grow, 0, clean).to(torch.int32),
        hysteresis_left=torch.where(grow, rule.hysteresis, left).to(torch.int32),
        skips_in_a_row=torch.where(bad, state.skips_in_a_row + 1, 0).to(torch.int32),
    )


def unscale_(gradients: Iterable[Tensor], inverse: Tensor) -> Tensor:
    """Multiply gradients by `inverse` in place; return 1.0 if any was not finite.

    Does not wait for the device. The check looks at the scaled numbers, as torch's
    does: with a scale of 1 or more, unscaling cannot create an inf.

    Args:
        gradients: Floating or complex tensors, dense or sparse, on any devices.
        inverse: One over the loss scale. float32, shape ().

    Returns:
        0.0 or 1.0 in float32, shape (), on the device of `inverse`.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001
        # The conjugate of a lazily conjugated tensor is the memory behind it.
        values = values.conj() if values.is_conj() else values
        values = torch.view_as_real(values) if values.is_complex() else values
        groups[values.device, values.dtype].append(values)
    flags = []
    for (device, dtype), group in groups.items():
        factor = inverse.to(device, non_blocking=True)
        if device.type == "cuda" and dtype == torch.bfloat16:
            # torch's kernel has no bf16 form on CUDA.
            largest = torch.stack(torch._foreach_norm(group, math.inf))  # noqa: SLF001
            torch._foreach_mul_(group, factor)
            flag = (~torch.isfinite(largest).all()).float()
        else:
            flag = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
        flags.append(flag.to(inverse.device, non_blocking=True))
    return torch.stack(flags).amax() if flags else torch.zeros_like(inverse)


class LossScaler:
    """A loss scale at work: scales losses, unscales gradients, moves by its rule.

    It works on tensors and never holds an optimizer.

    Args:
        rule: Static, dynamic or none: `ScaleRule.parse`.
        device: Where the losses are.
    """

    def __init__(self, rule: ScaleRule, device: torch.device | str = "cpu") -> None:
        self.rule = rule
        self.state = ScaleState.first(rule, device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in fp32 at least."""
        wide = torch.promote_types(loss.dtype, torch.float32)
        return loss.to(wide) * self.state.scale.to(loss.device, non_blocking=True)

    def unscale_(self, gradients: list[Tensor]) -> Tensor:
        """Divide gradients by the scale in place; return 1.0 if any was not finite."""
        found = unscale_(gradients, self.state.scale.double().reciprocal().float())
        if self.rule.min_scale < 1:
            # Dividing by a scale below 1 can itself overflow: look again.
            found = torch.maximum(found, unscale_(gradients, torch.ones_like(found)))
        return found

    def update(self, found_inf: Tensor) -> None:
        """Move to the scale of the next step."""
        self.state = advance(self.state, found_inf, self.rule)

    def state_dict(self) -> dict[str, float | int]:
        """Return the rule and the state as plain numbers. Waits for the device."""
        state = {f.name: getattr(self.state, f.name).item() for f in fields(ScaleState)}
        rule = {key: value for key, value in asdict(self.rule).items() if value}
        return {**rule, **state}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on from a saved state; the rule stays the one given here.

        Raises:
            UserError: If a field is missing.
        """
        loaded = {}
        for field in fields(ScaleState):
            if field.name not in state:
                message = (
                    f"loss-scale state has no {field.name!r}; it holds {[*state]}."
                )
                raise UserError(message)
            now = getattr(self.state, field.name)
            loaded[field.name] = torch.full_like(now, state[field.name])
        if self.rule.backoff_factor == 1:
            loaded["scale"] = self.state.scale  # fixed: the rule has the last word
        self.state = replace(self.state, **loaded)


def is_collapsed(scale: float, skips_in_a_row: int, rule: ScaleRule) -> bool:
    """Say whether skipping has gone on for too long, or can no longer help.

    Args:
        scale: Loss scale of the last backward pass.
        skips_in_a_row: Steps skipped since the last one applied, that one included.
        rule: Floor and limit.
    """
    limit = rule.max_consecutive_skips
    dynamic = rule.backoff_factor < 1
    # The scale is fp32, and so may hold the floor rounded up.
    lowest = scale <= rule.min_scale * (1 + 2**-23)
    at_floor = dynamic and lowest and skips_in_a_row >= FLOOR_PATIENCE
    return at_floor or (limit is not None and skips_in_a_row >= limit)


def collapse(scale: float, skips_in_a_row: int, culprits: str) -> LossScaleCollapse:
    """Return the error for a scale that no longer helps.

    Args:
        scale: Loss scale of the last backward pass.
        skips_in_a_row: Steps skipped since the last one applied.
        culprits: What was seen: the loss, the parameters.
    """
    return LossScaleCollapse(
        f"{skips_in_a_row} steps in a row overflowed, the last at loss scale "
        f"{scale:g}: {culprits}. A smaller scale cannot mend this: look for a loss or "
        "input that is not finite, lower the learning rate, or, if this is fp16, train "
        "in bf16 (--dtype bf16)."
    )


class Late:
    """Brings small device values to the host one step late, so that nobody waits.

    On a CPU there is nothing to wait for, and values arrive at once.
    """

    def __init__(self) -> None:
        self._under_way: tuple[Tensor, torch.cuda.Event] | None = None

    def send(self, values: Tensor) -> list[float] | None:
        """Start to fetch `values`; return the newest that have arrived, or None."""
        if values.device.type != "cuda":
            return [float(value) for value in values]
        arrived = None
        if self._under_way is not None and self._under_way[1].query():  # type: ignore[no-untyped-call]
            arrived = [float(value) for value in self._under_way[0]]
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._under_way = (host, event)
        return arrived

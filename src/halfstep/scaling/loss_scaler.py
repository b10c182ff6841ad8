"""`LossScaler` scales losses and unscales gradients; `advance` updates the scale."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._torch import async_read
from halfstep._torch.async_read import to_device_async
from halfstep._torch.optimizer_params import unnamed
from halfstep.errors import UserError
from halfstep.numerics.exponents import power_of_two
from halfstep.scaling.collapse import (
    CollapseMonitor,
    LossHistory,
    StepHistory,
)
from halfstep.scaling.loss_scale import FP32_MAX, ScaleRule, ScaleState
from halfstep.scaling.unscale import unscale_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.policy.rules import Policy
    from halfstep.scaling.step_report import NonFiniteParam


def advance(state: ScaleState, found_inf: Tensor, rule: ScaleRule) -> ScaleState:
    """Return the state after a step that did or did not overflow.

    It does not synchronize: the rule is a few selections on the device.

    With s the scale, c the clean steps, h the hysteresis left, and s' the next s::

        overflow, h > 1          s' = s                         c' = 0       h' = h - 1
        overflow, h <= 1         s' = max(s * backoff, floor)   c' = 0       h' = h
        clean, c + 1 >= window   s' = min(s * growth, ceiling)  c' = 0       h' = full
        clean                    s' = s                         c' = c + 1   h' = h

    With refill "clean", h' = full in the last line too.

    Growth needs "at least" `growth_interval` clean steps, not "exactly" as in torch: an
    interval that is shortened during a run would otherwise end growth.

    Args:
        state: Before the step; not changed.
        found_inf: Non-zero if a gradient on any rank held inf or NaN. Shape ().
        rule: Factors, interval and bounds.

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
    if state.scale.device.type in async_read.READABLE_DEVICES:
        # Reading is free, and thirty tensor operations on one number cost more than
        # checking a thousand gradients.
        return _advance_on_host(state, bool(found_inf), rule)
    # "cpu" for tests that pretend that it is not readable.
    has_kernel = state.scale.device.type in {"cpu", "cuda"}
    if has_kernel and rule.hysteresis == 1:
        return _advance_by_kernel(state, found_inf, rule)
    overflowed = found_inf.to(state.scale.device) > 0
    scale = _wide(state.scale)
    left, holds = state.hysteresis_left, state.hysteresis_left > 1
    clean = torch.where(overflowed, 0, state.clean_steps + 1)
    grow = clean >= _int32(rule.growth_interval)
    higher = scale * rule.growth_factor
    # As in torch, the scale does not grow beyond fp32. A loaded scale may be below the
    # minimum or above the maximum.
    grown = torch.maximum(higher.clamp(max=rule.max_scale), scale)
    clean_scale = torch.where(grow & (higher <= FP32_MAX), grown, scale)
    lower = torch.where(holds, scale, _lowered(scale, rule))
    left = left - (overflowed & holds).int()
    refilled = ~overflowed if rule.refill == "clean" else grow
    return ScaleState(
        torch.where(overflowed, lower, clean_scale).float(),
        torch.where(grow, 0, clean).to(torch.int32),
        torch.where(refilled, rule.hysteresis, left).to(torch.int32),
        torch.where(overflowed, state.skips_in_a_row + 1, 0.0),
    )


def _wide(scale: Tensor) -> Tensor:
    """Return a scale in double, to round once, as torch's kernel; MPS has no double."""
    return scale if scale.is_mps else scale.double()


def _lowered(scale: Tensor, rule: ScaleRule) -> Tensor:
    """Return the scale after an overflow; below the minimum it stays."""
    return torch.minimum((scale * rule.backoff_factor).clamp(min=rule.min_scale), scale)


def _int32(number: int) -> int:
    return min(number, 2**31 - 1)


def _copy_into(state: ScaleState, new: ScaleState) -> ScaleState:
    for field in fields(ScaleState):
        getattr(state, field.name).copy_(getattr(new, field.name))
    return state


def _advance_by_kernel(
    state: ScaleState, found_inf: Tensor, rule: ScaleRule
) -> ScaleState:
    """Return `advance`'s state by torch's kernel, in a third of the launches."""
    # The kernel writes to it; `data` has a version counter of its own.
    is_fixed = rule.growth_factor == rule.backoff_factor == 1
    scale = state.scale.data if is_fixed else state.scale.clone()
    interval = _int32(rule.growth_interval)
    clean = state.clean_steps.clamp(max=interval - 1)
    flag = found_inf.to(scale)
    torch._amp_update_scale_(
        scale, clean, flag, rule.growth_factor, rule.backoff_factor, interval
    )
    if not is_fixed:
        # A loaded scale may be below the minimum or above the maximum.
        lowest = state.scale.clamp(max=rule.min_scale)
        highest = None
        if rule.max_scale < FP32_MAX:
            highest = state.scale.clamp(min=rule.max_scale)
        scale.clamp_(lowest, highest)
    flag = flag.sign()
    skips = torch.addcmul(flag, flag, state.skips_in_a_row)
    new_scale = state.scale if is_fixed else scale
    return ScaleState(new_scale, clean, state.hysteresis_left, skips)


def _advance_on_host(
    state: ScaleState, overflowed: bool, rule: ScaleRule
) -> ScaleState:
    """Return `advance`'s state by Python numbers; unchanged tensors are reused."""
    scale, skips = state.scale.item(), state.skips_in_a_row
    if not overflowed:
        clean = state.clean_steps.item() + 1
        grow = clean >= rule.growth_interval
        next_scale, left = scale, state.hysteresis_left
        if grow and scale * rule.growth_factor <= FP32_MAX:
            next_scale = max(min(scale * rule.growth_factor, rule.max_scale), scale)
        if (grow or rule.refill == "clean") and left.item() != rule.hysteresis:
            left = left.new_tensor(rule.hysteresis)
        if skips.item():
            skips = skips.new_tensor(0)
        clean = 0 if grow else clean
    else:
        clean, next_scale = 0, scale
        left = state.hysteresis_left
        if left.item() > 1:
            left = left - 1
        else:
            next_scale = min(max(scale * rule.backoff_factor, rule.min_scale), scale)
        skips = skips + 1
    return ScaleState(
        state.scale if next_scale == scale else state.scale.new_tensor(next_scale),
        state.clean_steps.new_tensor(clean),
        left,
        skips,
    )


class LossScaler:
    """Scales losses, unscales gradients, and changes the scale by a rule.

    It works on lists of tensors and knows no optimizer: your loop skips the step.

    Args:
        rule: How the scale changes; see `ScaleRule.parse`.
        device: Device of the losses.

    Example:
        >>> import torch
        >>> scaler = LossScaler(ScaleRule(init_scale=1024.0))
        >>> weight = torch.ones(2, requires_grad=True)
        >>> scaler.scale(weight.sum()).backward()
        >>> found_inf = scaler.unscale_([weight.grad])
        >>> weight.grad, found_inf
        (tensor([1., 1.]), tensor(0.))
        >>> scaler.update(found_inf)
    """

    def __init__(self, rule: ScaleRule, device: torch.device | str = "cpu") -> None:
        self.rule = rule
        self.state = ScaleState.first(rule, device)
        self.monitor = CollapseMonitor(rule.init_scale)
        self.multiplies = rule.scales
        """Whether the scale can differ from 1: by the rule, or set by other code."""

    def __repr__(self) -> str:
        """Return the current scale and the rule. May synchronize."""
        return f"<LossScaler at {self.state.scale.item():g}: {self.rule}>"

    def observe_loss(
        self,
        loss: Tensor,
        name_of: Callable[[Tensor], str] = unnamed,
        policy: Policy | None = None,
    ) -> None:
        """Check a loss before its backward pass, for warnings and for the diagnosis.

        Args:
            loss: The unscaled loss.
            name_of: Returns the name of a parameter.
            policy: The policy of its forward pass, for the advice. None: that of the
                autocast context in which this thread made its graph, else torch's.
        """
        self.monitor.on_loss(loss, name_of, policy)

    def scale(self, loss: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return the loss times the scale, or another factor, in fp32 or wider."""
        wide = torch.promote_types(loss.dtype, torch.float32)
        if factor is None and not self.multiplies:
            return loss.to(wide)
        scale = self.state.scale if factor is None else factor
        if scale.device != loss.device:
            scale = to_device_async(scale, loss.device)
        return loss.to(wide) * scale

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None,
        **options: Any,  # noqa: ANN401 -- torch's
    ) -> tuple[Tensor, ...]:
        """Return unscaled gradients in fp32 or wider, as `torch.autograd.grad`.

        The pass is scaled by the square root of the scale: a loss of these gradients is
        differentiated through the same pass, with the rest of the scale. With the
        whole scale the first pass would overflow and the second underflow.

        Args:
            outputs: Unscaled outputs.
            inputs: Tensors to differentiate by.
            grad_outputs: As in torch, unscaled.
            options: Of `torch.autograd.grad`.
        """
        factor = power_of_two((self.state.scale.log2() / 2).floor())
        scaled = [self.scale(output, factor) for output in outputs]
        grads = torch.autograd.grad(scaled, inputs, grad_outputs, **options)
        inverse = factor.reciprocal()
        return tuple(g if g is None else self.scale(g, inverse) for g in grads)

    def unscale_(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide gradients by the scale in place; return 1.0 if any is non-finite."""
        recheck = self.monitor.may_be_below_one(self.rule)
        return unscale_(gradients, inverse_scale(self.state.scale), recheck=recheck)

    @property
    def needs_only_found_inf(self) -> bool:
        """Whether a check of the scaled gradients is enough.

        It is not with a scale below 1, where unscaling itself can overflow.
        """
        return self.rule.min_scale >= 1 or not self.monitor.may_be_below_one(self.rule)

    def set_state(self, scale: Tensor, clean_steps: Tensor) -> None:
        """Set the scale and the count of steps without overflow."""
        old = self.state
        if scale is not old.scale or clean_steps is not old.clean_steps:
            self.multiplies = True
            left, skips = old.hysteresis_left, old.skips_in_a_row
            self.state = ScaleState(scale, clean_steps, left, skips)

    def update(
        self,
        found_inf: Tensor,
        culprits: Callable[[], Sequence[NonFiniteParam]] = tuple,
    ) -> None:
        """Compute the scale of the next step.

        Args:
            found_inf: 1.0 if a gradient was non-finite, else 0.0. Shape ().
            culprits: Returns the parameters with non-finite gradients, for the message
                of `LossScaleCollapse`.

        Raises:
            LossScaleCollapse: If every step is skipped and no smaller scale helps.
        """
        before, scale_used = self.state, self.state.scale
        self.state = advance(self.state, found_inf, self.rule)
        if scale_used.is_cuda and async_read.is_capturing():
            # A CUDA graph repeats its kernels, on the same tensors.
            self.state = _copy_into(before, self.state)
        self.monitor.on_step(self.rule, scale_used, self.state, culprits)

    def state_dict(self) -> dict[str, Any]:
        """Return the rule and the state as plain numbers. Synchronizes."""
        state = {f.name: getattr(self.state, f.name).item() for f in fields(ScaleState)}
        state["skips_in_a_row"] = int(state["skips_in_a_row"])
        rule = {key: value for key, value in asdict(self.rule).items() if value}
        return {**rule, **state, "watch": self.monitor.state_dict()}

    @staticmethod
    def check(state: dict[str, Any]) -> None:
        """Raise if a state cannot be loaded.

        Raises:
            UserError: If a field is missing, or its history is malformed.
        """
        for field in fields(ScaleState):
            if field.name not in state:
                raise UserError(
                    f"loss-scale state has no {field.name!r}; it holds {[*state]}."
                )
        _history_from(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; the rule is not changed.

        Raises:
            UserError: If a field is missing, or its history is malformed.
        """
        self.check(state)
        loaded = {}
        for field in fields(ScaleState):
            current = getattr(self.state, field.name)
            loaded[field.name] = torch.full_like(current, state[field.name])
        loaded["hysteresis_left"].clamp_(1, self.rule.hysteresis)
        if self.rule.backoff_factor == 1:
            loaded["scale"] = self.state.scale  # a fixed scale is the rule's
        self.state = replace(self.state, **loaded)
        # A new monitor: values that have not arrived yet are of another run.
        log = self.monitor.log
        self.monitor = CollapseMonitor(float(loaded["scale"]))
        self.monitor.log = log
        self.monitor.restore(_history_from(state), self.rule)


def _history_from(state: dict[str, Any]) -> StepHistory:
    """Return the history in a state; older states have only the number of skips."""
    if "watch" in state:
        return StepHistory.from_data(state["watch"])
    return StepHistory(
        LossHistory(from_first_step=False), in_a_row=state["skips_in_a_row"]
    )


def inverse_scale(scale: Tensor) -> Tensor:
    """Return 1 / scale in fp32, to the bit as torch, which divides in double."""
    return scale.reciprocal()

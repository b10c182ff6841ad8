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
from halfstep.scaling.loss_scale import ScaleRule, ScaleState, check_scale
from halfstep.scaling.unscale import unscale_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.policy.rules import Policy
    from halfstep.scaling.step_report import NonFiniteParam


def advance(state: ScaleState, found_inf: Tensor, rule: ScaleRule) -> ScaleState:
    """Return the state after a step that did or did not overflow.

    It does not synchronize: torch's kernel changes scale and clean steps.

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
    interval = min(rule.growth_interval, 2**31 - 1)
    scale = state.scale.clone()
    clean = state.clean_steps.clamp(max=interval - 1)  # the kernel asks for equality
    flag = found_inf.to(scale).sign()
    torch._amp_update_scale_(
        scale, clean, flag, rule.growth_factor, rule.backoff_factor, interval
    )
    if rule.growth_factor > rule.backoff_factor:  # otherwise it stays
        # A loaded scale may be below the minimum or above the maximum.
        lowest = state.scale.clamp(max=rule.min_scale)
        scale.clamp_(lowest, state.scale.clamp(min=rule.max_scale))
    left = state.hysteresis_left
    if rule.hysteresis > 1:
        holds = (flag > 0) & (left > 1)
        scale = torch.where(holds, state.scale, scale)
        refills = flag == 0 if rule.refill == "clean" else (clean == 0) & (flag == 0)
        left = torch.where(refills, rule.hysteresis, left - holds.int())
    skips = torch.addcmul(flag, flag, state.skips_in_a_row)  # flag is 0 or 1
    return ScaleState(scale, clean, left, skips)


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
        inverse = inverse_scale(self.state.scale)
        return unscale_(gradients, inverse, recheck=self.may_be_below_one)

    @property
    def may_be_below_one(self) -> bool:
        """Whether the scale may be below 1: then unscaling can itself overflow."""
        if self.rule.min_scale >= 1:
            return False
        if self.state.scale.device.type in async_read.READABLE_DEVICES:
            return self.state.scale.item() < 1
        return self.monitor.may_be_below_one(self.rule)

    def set_state(self, scale: Tensor, clean_steps: Tensor) -> None:
        """Set the scale and the count of steps without overflow, both of shape ()."""
        old = self.state
        if scale is not old.scale or clean_steps is not old.clean_steps:
            self.multiplies = True
            left, skips = old.hysteresis_left, old.skips_in_a_row
            self.state = ScaleState(scale, clean_steps, left, skips)
            self.monitor.on_external_set()

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
        before = self.state
        self.state = advance(before, found_inf, self.rule)
        self.monitor.on_step(self.rule, before.scale, self.state, culprits)

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
            UserError: If a field is missing, its scale is not a positive number, or its
                history is malformed.
        """
        for field in fields(ScaleState):
            if field.name not in state:
                raise UserError(
                    f"loss-scale state has no {field.name!r}; it holds {[*state]}."
                )
        check_scale("scale", state["scale"])
        _history_from(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; the rule is not changed.

        Raises:
            UserError: As `check` raises it.
        """
        self.check(state)
        self.load_checked(state)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Load a state without a check: torch's class loads any scale."""
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
        skips = int(state["skips_in_a_row"])
        self.monitor.restore(_history_from(state), self.rule, skips)


def _history_from(state: dict[str, Any]) -> StepHistory:
    """Return the history in a state; other libraries' states have none."""
    if "watch" in state:
        return StepHistory.from_data(state["watch"])
    return StepHistory(LossHistory(from_first_step=False))


def inverse_scale(scale: Tensor) -> Tensor:
    """Return 1 / scale in fp32, to the bit as torch, which divides in double."""
    return scale.reciprocal()

"""torch's `GradScaler` interface over halfstep's rule.

In: losses and optimizers, as for `torch.amp.GradScaler`. Out: the same steps, and what
torch does not tell: whether a step was skipped, at which scale, and for which
parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from halfstep.fused import clear_new_state
from halfstep.scaler import (
    Late,
    ScaleRule,
    ScaleState,
    advance,
    collapse,
    is_collapsed,
)
from halfstep.stats import StepReport, non_finite

if TYPE_CHECKING:
    from torch import Tensor

_LOWEST = 2.0**-24
_HIGHEST = torch.finfo(torch.float32).max


class GradScaler(TorchGradScaler):
    """A drop-in for `torch.amp.GradScaler` that does not fail silently.

    Why: torch's scale can walk down to 0.0 and stay there, with NaN written into the
    weights; a skipped step leaves no trace. Here the scale has a floor, skipping
    without end raises, and `last_step` says what happened.

    The first six arguments are torch's.

    Args:
        device: Where the losses are.
        init_scale: First scale.
        growth_factor: Factor after `growth_interval` clean steps, above 1.
        backoff_factor: Factor after an overflow, between 0 and 1.
        growth_interval: Clean steps in a row before growth.
        enabled: False makes every method do what the loop would do without a scaler.
        min_scale: Floor; default 2**-24, lower than any scale that has been of use.
            Below 1, unscaling multiplies and can itself overflow; gradients are then
            checked a second time.
        max_scale: Ceiling; default fp32's largest number, as in torch.
        hysteresis: Overflows to bear before each back-off; 1 as in torch.
        max_consecutive_skips: Skips in a row after which `update` raises; None
            raises only where the scale lies at its floor.

    Raises:
        UserError: If a number is out of its range.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._bounds = {
            "min_scale": _LOWEST if min_scale is None else min_scale,
            "max_scale": _HIGHEST if max_scale is None else max_scale,
        }
        self._hysteresis = hysteresis
        self._max_consecutive_skips = max_consecutive_skips
        self._counters: tuple[Tensor, Tensor] | None = None
        self._late = Late()
        self._steps = 0
        self._last_step = StepReport(0, complete=False)
        self._stepped: list[torch.optim.Optimizer] = []
        if self._enabled:
            self._rule(init_scale)

    @property
    def last_step(self) -> StepReport:
        """What the last `update` closed; its properties may wait for the device.

        Names of parameters are those given to the optimizer (its `named_parameters`
        form), otherwise group and position. On a GPU with a fused optimizer they are
        read from the gradients still there when `found_inf_in` is read.
        """
        return self._last_step

    def _rule(self, scale: float) -> ScaleRule:
        """Return the rule; factors are read each time, for torch has setters."""
        return ScaleRule(
            init_scale=scale,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            hysteresis=self._hysteresis,
            max_consecutive_skips=self._max_consecutive_skips,
            **self._bounds,
        )

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,  # noqa: ANN401 -- torch's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> float | None:
        """Step the optimizer unless its gradients hold inf or NaN."""
        known = set(optimizer.state)
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            self._stepped.append(optimizer)
            flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            for flag in flags.values():
                clear_new_state(optimizer, known, flag)
        return result

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale, and below a scale of 1 look for what unscaling made infinite."""
        flags: dict[torch.device, Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        # A CPU can be asked whether it is needed; a GPU would have to be waited for.
        if self._bounds["min_scale"] < 1 and (inv_scale.is_cuda or inv_scale > 1):
            again = super()._unscale_grads_(
                optimizer, torch.ones_like(inv_scale), found_inf, allow_fp16
            )
            flags = {
                place: torch.maximum(flags[place], again[place]) for place in flags
            }
        return flags

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Close the iteration: move the scale, and take down what happened.

        Raises:
            LossScaleCollapse: If skipping has gone on for too long.
        """
        if not self._enabled or new_scale is not None:
            forced = float(new_scale) if isinstance(new_scale, int) else new_scale
            super().update(forced)
            self._stepped.clear()
            return
        scale, clean = self._check_scale_growth_tracker("update")
        flags = [
            flag.to(scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not flags:
            message = "No inf checks were recorded prior to update."
            raise AssertionError(message)
        found_inf = torch.stack([flag.reshape(()) for flag in flags]).amax()
        rule = self._rule(self._bounds["min_scale"])
        if self._counters is None:
            first = ScaleState.first(rule, scale.device)
            self._counters = first.hysteresis_left, first.skips_in_a_row
        before = scale.clone()
        after = advance(ScaleState(before, clean, *self._counters), found_inf, rule)
        self._counters = after.hysteresis_left, after.skips_in_a_row
        self._take_down(found_inf, before)
        scale.copy_(after.scale)
        clean.copy_(after.clean_steps)
        self._per_optimizer_states.clear()
        self._watch(before, after.skips_in_a_row, rule)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Neither a closure over gradients nor a CUDA event can be pickled.
        names = partial(tuple, self._last_step.found_inf_in)
        state["_last_step"] = replace(self._last_step, names=names)
        state["_late"] = Late()
        return state

    def _take_down(self, found_inf: Tensor, scale: Tensor) -> None:
        optimizers, self._stepped = self._stepped, []
        self._steps += 1

        def names() -> tuple[str, ...]:
            return tuple(n for o in optimizers for n in non_finite(_gradients(o)))

        if found_inf.device.type == "cpu" and found_inf:
            bad = names()

            def names() -> tuple[str, ...]:
                return bad

        self._last_step = StepReport(
            self._steps,
            complete=True,
            scale_used=scale,
            found_inf=found_inf,
            names=names,
        )

    def _watch(self, scale: Tensor, skips_in_a_row: Tensor, rule: ScaleRule) -> None:
        arrived = self._late.send(torch.stack((scale, skips_in_a_row)))
        if arrived and is_collapsed(arrived[0], int(arrived[1]), rule):
            names = ", ".join(self.last_step.found_inf_in[:3]) or "gradients"
            raise collapse(arrived[0], int(arrived[1]), f"not finite: {names}")


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return an optimizer's gradients with the best names there are."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            if param.grad is not None:
                place = f"group {number} parameter {index} {tuple(param.shape)}"
                found.append((names[index] if names else place, param.grad))
    return found

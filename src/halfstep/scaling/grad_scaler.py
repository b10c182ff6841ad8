"""torch's `GradScaler` interface over halfstep's rule.

In: losses and optimizers, as for `torch.amp.GradScaler`. Out: the same steps, and what
torch does not tell: whether a step was skipped, at which scale, and for which
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from halfstep._torch import fused_optimizers
from halfstep._torch.optimizer_params import gradients_of, name_of
from halfstep.scaling import misuse, optimizer_step, unscale
from halfstep.scaling.foreign_state import recognise
from halfstep.scaling.host_scale import Known
from halfstep.scaling.loss_scale import ScaleRule
from halfstep.scaling.loss_scaler import one_over
from halfstep.scaling.per_loss import Scales
from halfstep.scaling.scaler_backward import Apart
from halfstep.scaling.step_report import (
    StepReport,
    Taken,
    optimizers_of,
    report_on,
    seen_later,
    still_there,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.scaling.loss_scaler import LossScaler
    from halfstep.scaling.step_report import Culprit

_LOWEST = 2.0**-24
_HIGHEST = torch.finfo(torch.float32).max


class GradScaler(TorchGradScaler):
    """A drop-in for `torch.amp.GradScaler` that does not fail silently.

    Why: torch's scale can walk down to 0.0, with NaN written into the weights; a
    skipped step leaves no trace. Here the scale has a floor, skipping without end
    raises, and `last_step` says what happened. Six arguments are torch's.

    Args:
        device: Where the losses are.
        init_scale: First scale.
        growth_factor: Factor after `growth_interval` clean steps, above 1.
        backoff_factor: Factor after an overflow, between 0 and 1.
        growth_interval: Clean steps in a row before growth.
        enabled: False makes a loop do what it would do without a scaler.
        min_scale: Floor; default 2**-24, lower than any scale that has been of use.
            Below 1 unscaling can itself overflow: gradients are then checked twice.
        max_scale: Ceiling; default fp32's largest number, as in torch.
        hysteresis: Overflows to bear before each back-off; 1 as in torch.
        refill: What brings hysteresis back: "growth" alone, or each "clean" step.
        max_consecutive_skips: Skips in a row after which `update` raises; None
            raises only where the scale lies at its floor, or after 50 without a scale.
        strategy: "backoff" as in torch; "measured" and "logmax" look at the gradients
            and choose the scale; "none" keeps it at 1 and only guards (bf16, fp32).
        process_group: Ranks that must skip together. Not needed under DDP, whose
            averaged gradients carry an inf to every rank, nor for DTensors.
        drop_bad_microbatch: `backward` leaves out a pass that overflowed.
        retries: How often `backward` runs an overflowed pass again at a lower scale,
            and waits for the device. Not under DDP, which averages the first try only.

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
        refill: str = "growth",
        max_consecutive_skips: int | None = None,
        strategy: str = "backoff",
        process_group: torch.distributed.ProcessGroup | None = None,
        drop_bad_microbatch: bool = False,
        retries: int = 0,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        # torch leaves these out of a disabled one, and its getters then fail.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._guards_only = strategy == "none"
        if self._guards_only and max_consecutive_skips is None:
            max_consecutive_skips = 50  # no floor would end such a run
        self._init_scale = 1.0 if self._guards_only else init_scale
        self._bounds: dict[str, Any] = {
            "init_scale": self._init_scale,
            "min_scale": _LOWEST if min_scale is None else min_scale,
            "max_scale": _HIGHEST if max_scale is None else max_scale,
            "hysteresis": hysteresis,
            "refill": refill,
            "max_consecutive_skips": max_consecutive_skips,
            "strategy": "backoff" if self._guards_only else strategy,
        }
        self._factors = growth_factor, backoff_factor, growth_interval
        rule = self._rule() if self._enabled else ScaleRule()
        self._group = group = process_group
        self._scales = scales = Scales(rule, group)
        self._apart = Apart(scales, drop_bad_microbatch, retries, group)
        self._known = Known()
        self._scaled = self._proposed = False
        self._stepped, self._last_taken = list[Taken](), list[Taken]()
        self._steps, self._last_step = 0, StepReport(0, complete=False)

    @property
    def last_step(self) -> StepReport:
        """What the last `update` closed; its properties may wait for the device.

        Names are those given to the optimizer, otherwise group and position. The norm
        (after clipping) and, on a GPU, the names need gradients not cleared yet.
        """
        return self._last_step

    def _rule(self) -> ScaleRule:
        growth, backoff, interval = self._factors
        return ScaleRule(
            growth_factor=growth if self._bounds["strategy"] == "backoff" else 1.0,
            backoff_factor=1.0 if self._guards_only else backoff,
            growth_interval=interval,
            **self._bounds,
        )

    def _main(self) -> LossScaler:
        """Return the scale at work; torch's attributes have the last word."""
        scale, clean = self._check_scale_growth_tracker("update")
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        if factors != self._factors:
            self._factors = factors
            self._scales.rule = self._rule()
        main = self._scales.of("", scale.device)
        set_to = self._known.look(scale, self._init_scale)
        if set_to is not None:
            main.watch.forget(set_to)
            main.proposal = None
        main.put(scale, clean)
        return main

    def scale(self, outputs: Any) -> Any:
        """Return outputs times the scale: a tensor, or nested ones."""
        first = outputs
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if self._enabled and isinstance(first, torch.Tensor):
            self._scaled = True
            self._apart.refuse_mixing(first)
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(first.device)
            main = self._main()
            main.begin(first, self._name_of)
            self._publish(main)
        return super().scale(outputs)

    def _publish(self, main: LossScaler) -> None:
        """Write the state of the scale where torch keeps it."""
        scale, clean = self._check_scale_growth_tracker("update")
        if main.state.scale is not scale:
            scale.copy_(main.state.scale)
            clean.copy_(main.state.clean_steps)
            main.put(scale, clean)
            self._known.written(scale)

    def _name_of(self, param: Tensor) -> str:
        return name_of(param, optimizers_of(self._last_taken))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and look for inf and NaN.

        Raises:
            RuntimeError: If that was done since the last `update`.
            ValueError: If gradients are fp16.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise misuse.unscaled_twice(state["stage"], state.get("where"))
        found = torch.zeros_like(scale)
        flags = self._unscale_grads_(
            optimizer, one_over(scale), found, allow_fp16=False
        )
        state["found_inf_per_device"] = flags
        state["where"] = misuse.caller()
        state["stage"] = OptState.UNSCALED
        self._propose([found, *flags.values()], optimizer)

    def _propose(self, flags: list[Tensor], *optimizers: Optimizer) -> None:
        """Let a strategy see gradients; every rank comes here as often."""
        if self._bounds["strategy"] != "backoff":
            main, self._proposed = self._main(), True
            found = unscale.highest(flags, main.state.scale.device)
            gradients = [grad for one in optimizers for grad in gradients_of(one)]
            main.wish(main.strategy.propose(gradients, main.state, found))

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale, and below a scale of 1 look for what unscaling made infinite."""
        gradients = gradients_of(optimizer)
        dtypes = unscale.dtypes_of(gradients)
        if torch.float16 in dtypes:
            gradients = misuse.unless_fp16(optimizer, allow_fp16)
        main = self._scales.of("", inv_scale.device)
        again = main.watch.may_be_below_one(main.rule)
        seen = gradients
        if again and allow_fp16:  # a kernel will divide, and can look no more then
            seen = unscale.divided(gradients, main.state.scale)
            dtypes = unscale.dtypes_of(seen)
        flags = unscale.unscale_by_device_(seen, inv_scale, dtypes, again=again)
        state = self._per_optimizer_states[id(optimizer)]
        return unscale.exchange(flags, found_inf, gradients, self._group, state)

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        state = self._per_optimizer_states[id(optimizer)]
        unscale.agreed(state)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients hold inf or NaN.

        A closure (LBFGS, SAM) scales its loss, runs the backward pass, and returns the
        loss itself. If one of its evaluations overflows, the whole step is taken back.

        Returns:
            What the optimizer's step returned; None if it was skipped.

        Raises:
            RuntimeError: If it was stepped since the last `update`.
            AssertionError: If no parameter of it has a gradient.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        result: float | None
        closure = kwargs.pop("closure", None)
        if closure is None and args and callable(args[0]):
            closure, args = args[0], args[1:]
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            message = "step() has already been called since the last update()."
            raise RuntimeError(message)
        if closure is not None:
            stale = any(
                taken.optimizer is optimizer and taken.gradients()
                for taken in self._last_taken
            )
            if self._scaled and not stale and state["stage"] is OptState.READY:
                self.unscale_(optimizer)  # SAM's first pass came before the step
            result = optimizer_step.with_closure(
                self, closure, optimizer, state, *args, **kwargs
            )
        elif fused_optimizers.skips_inside(optimizer):
            self._main()  # somebody may have set the scale
            known = self._known
            result = optimizer_step.fused_step(
                self, optimizer, state, known, *args, **kwargs
            )
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not unscale.agreed(state):
                raise misuse.no_gradients(optimizer)
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        flags = state["found_inf_per_device"].values()
        self._stepped.append(Taken(optimizer, flags))
        return result

    def backward(
        self,
        loss: Tensor,
        *optimizers: Optimizer,
        name: str = "",
        retain_graph: bool = False,
    ) -> None:
        """Run a backward pass whose gradients are unscaled and looked at by itself.

        For losses with scales of their own, `drop_bad_microbatch` and `retries`. Then
        `.grad` holds unscaled sums: clip, `step` and `update` as ever, but run all
        passes of an iteration this way. Under DDP each needs a forward pass of its own.

        Args:
            loss: Shape ().
            optimizers: All whose parameters it reaches.
            name: Losses of different names have scales of their own; "" is `scale`'s.
            retain_graph: As for `Tensor.backward`.

        Raises:
            RuntimeError: If gradients are there that `backward` did not make.
        """
        if not self._enabled:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        main = self._main()
        scaler = self._scales.of(name, loss.device) if name else main
        scaler.begin(loss, self._name_of)
        states = [self._per_optimizer_states[id(one)] for one in optimizers]
        pairs = list(zip(optimizers, states, strict=True))
        self._apart.backward(scaler, name, loss, pairs, retain_graph=retain_graph)
        self._publish(main)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Close the iteration: move the scale, and take down what happened.

        Raises:
            LossScaleCollapse: If skipping has gone on for too long.
            AssertionError: If no gradient was looked at since the last `update`.
        """
        if not self._enabled:
            return
        main = self._main()
        states = list(self._per_optimizer_states.values())
        flags = [flag for state in states for flag in unscale.agreed(state)]
        used = main.state.scale.clone()
        if new_scale is not None:
            # torch knows no int, and leaves its counter alone.
            whole = isinstance(new_scale, int)
            super().update(float(new_scale) if whole else new_scale)
        elif not flags:
            raise misuse.no_checks(optimizers_of(self._stepped))
        self._last_taken, self._stepped = self._stepped, []
        if flags:
            self._steps += 1
            found_inf = unscale.highest(flags, used.device)
            said = self._apart.scale_or(used), found_inf, self._apart.dropped
            self._last_step = report_on(self._last_taken, self._steps, *said)
        try:
            if new_scale is None:
                main.put(used, main.state.clean_steps)
                self._move(main, states, found_inf)
        finally:
            self._scales.forget()
            self._apart.close()
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            self._scaled = self._proposed = False

    def _move(self, main: LossScaler, states: list[Any], found_inf: Tensor) -> None:
        """Let each scale that was used move by its own overflows."""
        low, high = self._bounds["min_scale"], self._bounds["max_scale"]
        self._known.moves((*self._factors[:2], low, high))
        plain = [state for state in states if "ledger" not in state]
        own = [flag for state in plain for flag in unscale.agreed(state)]
        if own and not self._proposed:
            self._propose(own)  # a fused kernel unscaled them
        if own and len(plain) < len(states):
            self._scales.note("", unscale.highest(own, found_inf.device))
        culprits: Callable[[], tuple[Culprit, ...]]
        culprits = partial(still_there, self._last_taken)
        if main.watch.wants_names(found_inf.device):
            pairs = [part.gradients() or [] for part in self._last_taken]
            culprits = seen_later([pair for part in pairs for pair in part])
        try:
            self._scales.move(found_inf, culprits)
        finally:
            self._publish(main)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and one more, which torch ignores. Waits."""
        extra = {"_halfstep": self._scales.state_dict()} if self._enabled else {}
        return super().state_dict() | extra

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class, of torch's, or of apex.amp.

        Raises:
            RuntimeError: If it is empty; KeyError if an entry is missing.
        """
        if self._enabled:
            state = recognise(state_dict, super().state_dict())
            more = state.get("_halfstep")
            self._scales.check(more)
            super().load_state_dict(
                state | {"scale": 1.0} if self._guards_only else state
            )
            self._scales.load_state_dict(more)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._group is not None:
            raise misuse.pickled_group()
        scales = Scales(self._scales.rule)
        scales.load_state_dict(self._scales.state_dict())
        apart = Apart(scales, self._apart.drop, self._apart.retries)
        state |= {"_last_taken": [], "_known": Known(), "_apart": apart}
        return state | {"_scales": scales, "_last_step": self._last_step.read()}

"""`GradScaler`: torch's interface with halfstep's scale rule and step reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from halfstep._torch import async_read, fused_optimizers
from halfstep._torch.optimizer_params import (
    coalesce,
    first_gradient,
    gradients_of,
    name_of,
)
from halfstep.errors import require, require_type
from halfstep.numerics.norms import absmax_of, nonfinite_marks
from halfstep.scaling import grad_scaler_step, misuse, unscale
from halfstep.scaling.call_order import CallOrderWatch
from halfstep.scaling.found_inf_reduction import reduce_found_inf, reduction_groups
from halfstep.scaling.loss_scale import FP32_MAX, ScaleRule, ScaleState
from halfstep.scaling.loss_scaler import LossScaler, inverse_scale
from halfstep.scaling.step_report import (
    NonFiniteMarks,
    OptimizerGrads,
    StepReport,
    nonfinite_params_of,
    norm_of,
    optimizers_of,
    remaining_nonfinite,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.scaling.step_report import NonFiniteParam

STRATEGIES = ("backoff", "none")
_MIN_SCALE = 2.0**-24
_OF_TORCH = {"scale": "scale", "clean_steps": "_growth_tracker"}
"""Entries of a `LossScaler`'s state that torch's state holds: their names there."""
_OWN = ("hysteresis_left", "skips_in_a_row", "watch")
"""Those that it does not hold."""


class GradScaler(TorchGradScaler):
    """A drop-in for `torch.amp.GradScaler` that reports skips and cannot reach scale 0.

    torch's scale can fall to 0.0, after which NaN is written into the weights, and a
    skipped step is not reported. Here the scale has a minimum, skipping without end
    raises `LossScaleCollapse`, and `last_step` reports each step. The first six
    arguments and their defaults are torch's.

    Args:
        device: Device type of the losses.
        init_scale: First scale, > 0.
        growth_factor: Factor after `growth_interval` steps without overflow, > 1.
        backoff_factor: Factor after an overflow, between 0 and 1.
        growth_interval: Consecutive steps without overflow before the scale grows.
        enabled: False makes a loop behave as it would without a scaler.
        min_scale: Smallest scale. Default 2**-24: no useful scale is smaller. Below 1,
            unscaling can itself overflow, so gradients are then checked twice.
        max_scale: Largest scale. Default: the largest fp32 number, as in torch.
        hysteresis: Overflows until the scale is reduced, >= 1; 1 as in torch. After
            that, each overflow reduces it, until the count is reset.
        refill: What resets the hysteresis: "growth" of the scale, or each "clean" step.
        max_consecutive_skips: Consecutive skips after which `update` raises. None, the
            default: only overflows at the minimum scale raise, after 10; with strategy
            "none", which has no minimum, 50 skips raise.
        strategy: "backoff" as in torch; "none" keeps the scale at 1 and only skips
            (bf16, fp32).
        process_group: Ranks that must skip together. Not needed under DDP, whose
            averaged gradients carry an inf to every rank, nor for DTensors.

    Raises:
        UserError: If a number is out of its range.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(2)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step.applied, scaler.last_step.scale
        (True, 65536.0)
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
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        # torch does not set these if `enabled` is False, and its getters then fail.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        require("strategy", strategy, strategy in STRATEGIES, f"one of {STRATEGIES}")
        self._guards_only = strategy == "none"
        if self._guards_only and max_consecutive_skips is None:
            max_consecutive_skips = 50  # there is no minimum scale to end such a run
        self._init_scale = 1.0 if self._guards_only else init_scale
        rule = ScaleRule()
        if enabled:
            rule = ScaleRule(
                self._init_scale,
                min_scale=_MIN_SCALE if min_scale is None else min_scale,
                max_scale=FP32_MAX if max_scale is None else max_scale,
                hysteresis=hysteresis,
                refill=refill,
                max_consecutive_skips=max_consecutive_skips,
                **self._factors(),
            )
        self._loss_scaler = LossScaler(rule)
        self._group = process_group
        self._scaled = False
        self._stepped_grads: list[OptimizerGrads] = []
        self._last_grads: list[OptimizerGrads] = []
        self._steps, self._last_step = 0, StepReport(0, complete=False)
        self.call_order_watch: CallOrderWatch | None = CallOrderWatch()
        """Checks the order of calls in the first iterations; then None."""
        self._has_loaded = False

    @property
    def last_step(self) -> StepReport:
        """Report of the step that the last `update` finished.

        Parameters are named as they were given to the optimizer, otherwise by group and
        position. `grad_norm` (after clipping) and, on a GPU, `found_inf_in` need
        gradients that have not been cleared. Properties may synchronize with the
        device.
        """
        return self._last_step

    def _factors(self) -> dict[str, Any]:
        """Return the fields of the rule that torch's setters can change."""
        return {
            "growth_factor": 1.0 if self._guards_only else self._growth_factor,
            "backoff_factor": 1.0 if self._guards_only else self._backoff_factor,
            "growth_interval": self._growth_interval,
        }

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make torch's tensors, and the loss scaler of them."""
        super()._lazy_init_scale_growth_tracker(dev)
        scale, clean = self._check_scale_growth_tracker("scale")
        state = self._loss_scaler.state
        left, skips = state.hysteresis_left.to(dev), state.skips_in_a_row.to(dev)
        self._loss_scaler.state = ScaleState(scale, clean, left, skips)

    def _synced_scaler(self) -> LossScaler:
        """Return the loss scaler, with what torch's code has set."""
        scale, clean = self._check_scale_growth_tracker("update")
        scaler, factors = self._loss_scaler, self._factors()
        if not factors.items() <= vars(scaler.rule).items():
            scaler.rule = replace(scaler.rule, **factors)
        scaler.set_state(scale, clean)
        return scaler

    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the loss scale.

        Args:
            outputs: A loss, or nested lists and tuples of losses.
        """
        first = outputs
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if self._enabled and isinstance(first, torch.Tensor):
            self._scaled = True
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(first.device)
            self._synced_scaler().observe_loss(first, self._name_of)
        scaled = super().scale(outputs)
        if self._enabled and isinstance(outputs, torch.Tensor):
            watch = self._watch()
            if watch is not None:
                watch.on_scale(outputs, scaled)
        return scaled

    def _watch(self) -> CallOrderWatch | None:
        """Return the watch; a CUDA graph's capture ends it, for it reads weights."""
        if self.call_order_watch is not None and async_read.is_capturing():
            self.call_order_watch = None
        return self.call_order_watch

    def _name_of(self, param: Tensor) -> str:
        return name_of(param, optimizers_of(self._last_grads))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and check for inf and NaN.

        Call it once per step, before clipping; `step` calls it otherwise.

        Raises:
            RuntimeError: If it was called since the last `update`.
            ValueError: If gradients are fp16.
        """
        if not self._enabled:
            return
        self._init_loaded_scale(optimizer)
        scale, _ = self._check_scale_growth_tracker("unscale_")
        watch = self._watch()
        if watch is not None:
            watch.on_unscale(optimizer, scale)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise misuse.unscaled_twice(state["stage"], state.get("where"))
        found_inf = torch.zeros_like(scale)
        flags = self._unscale_grads_(
            optimizer, inverse_scale(scale), found_inf, allow_fp16=False
        )
        state["found_inf_per_device"] = flags
        state["where"] = misuse.caller()
        state["stage"] = OptState.UNSCALED

    def _init_loaded_scale(self, optimizer: Optimizer) -> None:
        """Use a loaded scale before the first `scale`: gradients may already exist."""
        gradient = first_gradient(optimizer)
        if self._has_loaded and self._scale is None and gradient is not None:
            self._lazy_init_scale_growth_tracker(gradient.device)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale and check; at a scale below 1, check again after unscaling."""
        gradients = gradients_of(optimizer)
        dtypes = unscale.dtypes_of(gradients)
        if torch.float16 in dtypes:
            if not allow_fp16:
                raise misuse.fp16_gradients(optimizer)
            coalesce(optimizer)
            gradients = gradients_of(optimizer)
        scaler = self._synced_scaler()
        recheck, checked = scaler.may_be_below_one, gradients
        if recheck and allow_fp16:  # a fused kernel divides, and does not check again
            checked = unscale.divided_copies(gradients, scaler.state.scale)
            dtypes = unscale.dtypes_of(checked)
        flags = unscale.unscale_by_device_(checked, inv_scale, dtypes, recheck=recheck)
        if not reduction_groups(gradients, self._group):
            return flags
        # A rank without gradients must take part, or the others hang.
        flag = unscale.max_flag([found_inf, *flags.values()], found_inf.device)
        return {flag.device: reduce_found_inf(flag, gradients, self._group)}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients hold inf or NaN.

        A closure (LBFGS, SAM) scales its loss, runs the backward pass, and returns the
        unscaled loss. If one of its evaluations overflows, the whole step is undone.

        Args:
            optimizer: Any torch optimizer.
            args: For `optimizer.step`; a closure may come first.
            kwargs: For `optimizer.step`.

        Returns:
            The return value of the optimizer's step; None if it was skipped.

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
        state = self._before_step(optimizer, has_closure=closure is not None)
        if closure is not None:
            stale = any(
                grads.optimizer is optimizer and grads.gradients()
                for grads in self._last_grads
            )
            if self._scaled and not stale and state["stage"] is OptState.READY:
                self.unscale_(optimizer)  # SAM's first pass came before the step
            result = grad_scaler_step.step_with_closure(
                self, closure, optimizer, state, *args, **kwargs
            )
        elif fused_optimizers.handles_found_inf(optimizer):
            result = grad_scaler_step.step_fused(
                self, optimizer, state, *args, **kwargs
            )
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not state["found_inf_per_device"]:
                raise misuse.no_gradients(optimizer)
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"], state["where"] = OptState.STEPPED, misuse.caller()
        flags = state["found_inf_per_device"].values()
        self._stepped_grads.append(OptimizerGrads(optimizer, flags))
        return result

    def _before_step(
        self, optimizer: Optimizer, *, has_closure: bool
    ) -> dict[str, Any]:
        """Raise on a second step, check the order of calls; return torch's state."""
        if has_closure:
            self.call_order_watch = None  # the closure scales, which is not watched
        else:
            self._init_loaded_scale(optimizer)
            self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise misuse.stepped_twice(state.get("where"))
        watch = self._watch()
        if watch is not None:
            unscaled = state["stage"] is OptState.UNSCALED
            if self._scale is not None and not unscaled:  # a fused kernel will do it
                watch.on_unscale(optimizer, self._scale)
            is_new = not self._has_loaded
            watch.on_step(self, optimizer, unscaled=unscaled, is_new=is_new)
        return state

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Finish the iteration: set the scale of the next one, and make `last_step`.

        Args:
            new_scale: The next scale, as in torch. None: the rule decides.

        Raises:
            LossScaleCollapse: If every step is skipped and no smaller scale helps.
            AssertionError: If no gradient was checked since the last `update`.
        """
        if not self._enabled:
            return
        watch = self._watch()
        if watch is not None:
            watch.on_update()
            if watch.is_over:
                self.call_order_watch = None
        scaler = self._synced_scaler()
        states = self._per_optimizer_states.values()
        flags = [f for each in states for f in each["found_inf_per_device"].values()]
        scale_used = scaler.state.scale.clone()  # changed in place below
        if new_scale is not None:
            # torch accepts no int; it does not reset its growth counter here.
            is_int = isinstance(new_scale, int)
            super().update(float(new_scale) if is_int else new_scale)
            scaler.monitor.on_external_set()
        elif not flags:
            stepped = optimizers_of(self._stepped_grads)
            reasons = map(misuse.why_no_gradients, stepped)
            reason = " ".join(reasons) or "Call step(optimizer) before update()."
            message = f"No inf checks were recorded prior to update. {reason}"
            raise AssertionError(message)
        self._last_grads, self._stepped_grads = self._stepped_grads, []
        if flags:
            self._steps += 1
            found_inf = unscale.max_flag(flags, scale_used.device)
            self._last_step = StepReport(
                self._steps,
                complete=True,
                scale_used=scale_used,
                found_inf=found_inf,
                norm=partial(norm_of, self._last_grads),
                culprits=partial(nonfinite_params_of, self._last_grads),
            )
        try:
            if new_scale is None:
                self._update_scale(scaler, found_inf)
        finally:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            self._scaled = False

    def _update_scale(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Apply the rule, in torch's tensors: a CUDA graph may hold them."""
        culprits: Callable[[], tuple[NonFiniteParam, ...]]
        culprits = partial(remaining_nonfinite, self._last_grads)
        if scaler.monitor.needs_names(found_inf.device):
            pairs = [p for part in self._last_grads for p in part.gradients() or ()]
            if pairs:
                names, grads = zip(*pairs, strict=True)
                marks = nonfinite_marks(grads, absmax_of(grads))
                culprits = NonFiniteMarks(names, marks)
        state = scaler.state
        try:
            scaler.update(found_inf, culprits)
        finally:
            scaler.state = state.copy_(scaler.state)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, and one more that torch's `load` ignores.

        Synchronizes with the device.
        """
        if not self._enabled:
            return {}
        state = self._loss_scaler.state_dict()
        own = {name: state[name] for name in _OWN}
        return super().state_dict() | {"_halfstep": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of `torch.amp.GradScaler`, or of apex.amp.

        Args:
            state_dict: The state. It must not be empty.

        Raises:
            RuntimeError: If it is empty.
            KeyError: If an entry is missing.
            UserError: If the entry that torch's state lacks is malformed.
        """
        if self._enabled:
            state = _from_foreign_state(state_dict, super().state_dict())
            if self._guards_only:
                state = state | {"scale": 1.0}
            scaler = self._loss_scaler
            first = {"hysteresis_left": scaler.rule.hysteresis, "skips_in_a_row": 0}
            # torch raises for a missing one.
            torchs = {name: state.get(key) for name, key in _OF_TORCH.items()}
            own = state.get("_halfstep", first)
            expected = "a dict, as it was saved"
            require_type("_halfstep", own, isinstance(own, dict), expected)
            own = own | torchs
            LossScaler.check(own | {"scale": 1.0})
            super().load_state_dict(state)
            scaler.load_checked(own)
            self._has_loaded = True

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._group is not None:
            raise TypeError(
                "a GradScaler with a process_group cannot be pickled, because the "
                "group cannot; save scaler.state_dict(), and load it into one that is "
                "given the group."
            )
        return state | {
            "_last_grads": [],
            "call_order_watch": None,
            "_last_step": self._last_step.read(),
        }


def _from_foreign_state(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a state in torch's format.

    Args:
        state: Of torch or halfstep (returned as it is); of apex.amp, {"loss_scaler0":
            {"loss_scale": 65536.0, "unskipped": 12}}; or one such entry. With several
            losses, the first is used.
        own: The scaler's own state, for entries that apex does not save.
    """
    entry = state.get("loss_scaler0", state)
    if isinstance(entry, dict) and {"loss_scale", "unskipped"} <= entry.keys():
        scale, clean = float(entry["loss_scale"]), int(entry["unskipped"])
        return own | {"scale": scale, "_growth_tracker": clean}
    return state

"""amp's loss scalers, and its state of an optimizer: gradients, masters, skipped steps.

Gradients of the optimizer are unscaled after each pass before they are summed, and its
`step` can be skipped.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch.optimizer_params import params_of
from halfstep.compat.apex import models
from halfstep.compat.apex.state import STATE, AmpError, maybe_print
from halfstep.scaling import LossScaler, ScaleRule
from halfstep.scaling.step_report import find_nonfinite_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from halfstep.masters import MasterWeights
    from halfstep.scaling.step_report import NonFiniteParam

ATTRIBUTE = "_amp_stash"


class AmpOptimizerState:
    """Gradients of one optimizer between backward passes.

    Backward passes of one step may have different loss scales, so scaled gradients
    cannot be summed. Unscaled gradients are saved before a pass, and added in fp32 to
    the gradients of that pass after these are unscaled.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: MasterWeights | None
    ) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self.unchecked: list[AmpScaler] = []
        """Those that unscaled gradients here, and whose result is not read yet."""
        self.skipped_by: AmpScaler | None = None
        """The one that found an overflow: the next step is skipped."""
        self._saved_grads: dict[Tensor, Tensor] = {}
        self._pending_scale: float | None = None
        self._is_synced = False
        models.record(self.pairs)

    @property
    def pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Pairs of 16-bit parameter and fp32 master weight."""
        return [] if self.masters is None else self.masters.pairs

    def stored(self, param: Tensor) -> Tensor:
        """Return the model's parameter for one of the optimizer's parameters."""
        return param if self.masters is None else self.masters.model_param(param)

    def _params(self) -> list[Tensor]:
        """Return the model's parameters, once each."""
        return [*map(self.stored, params_of(self.optimizer))]

    @property
    def _has_scaled(self) -> bool:
        """Whether gradients of earlier passes wait to be unscaled."""
        is_delayed = self._pending_scale is not None
        return is_delayed and any(param.grad is not None for param in self._params())

    def prepare(self, scale: float) -> None:
        """Save the unscaled gradients before a backward pass with this loss scale."""
        if not self._is_synced:
            models.sync_from_params(self.pairs)
            self._is_synced = True
        if self._has_scaled:
            if self._pending_scale != scale:
                raise AmpError(
                    f"gradients scaled by {self._pending_scale:g} wait to be unscaled, "
                    f"and this loss is scaled by {scale:g}: leave delay_unscale out "
                    "where losses have scales of their own."
                )
            return
        self._pending_scale = None
        low = {param for param, _ in self.pairs}
        for param in self._params():
            if param.grad is not None and param not in low:
                self._saved_grads[param] = param.grad
            param.grad = None

    def delay(self, scale: float) -> None:
        """Leave the gradients of a pass scaled, for a later pass to unscale."""
        self._pending_scale = scale

    def restore(self) -> None:
        """Drop the gradients of a failed pass, unless earlier ones are scaled too."""
        if self._pending_scale is None:
            for param in self._params():
                param.grad = None
            self._add_saved_grads()

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter, scaled gradient) of a pass, of 16-bit parameters in fp32.

        A gradient is the parameter's `.grad`, or is to be added to it by `add`.
        """
        self._pending_scale = None
        grads: list[tuple[Tensor, Tensor]] = []
        new_masters = []
        for param, master in self.pairs:
            if param.grad is None:
                continue
            if master.grad is None:
                new_masters.append(master)
                continue
            grads.append((master, param.grad.float()))
            param.grad = None
        if self.masters is not None:
            self.masters.accumulate_grads()
        grads += [(m, m.grad) for m in new_masters if m.grad is not None]
        # Those of 16-bit parameters are freed by now.
        grads += [(p, p.grad) for p in self._params() if p.grad is not None]
        return grads

    @torch.no_grad()
    def add(self, unscaled: list[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients of `collect`, now unscaled, to those of earlier passes."""
        for param, gradient in unscaled:
            if param.grad is not gradient:
                _add_grad(param, gradient)
        self._add_saved_grads()

    def _add_saved_grads(self) -> None:
        for param, gradient in self._saved_grads.items():
            _add_grad(param, gradient)
        self._saved_grads.clear()

    def step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's own step, unless a gradient is non-finite."""
        for scaler in list(self.unchecked):
            scaler.finish_check()
        self._check_unscaled()
        self._check_masters_have_grads()
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and (self.pairs or STATE.scales):
            raise AmpError(
                f"{type(self.optimizer).__name__}.step was given a closure, and amp "
                "does not support one where it scales losses or keeps masters."
            )
        if self.skipped_by is not None:
            maybe_print(self.skipped_by.skip_message())
            self.skipped_by = None
            self.clear_master_grads()
            # Otherwise schedulers warn that they step before the optimizer.
            vars(self.optimizer)["_opt_called"] = True
            return None
        with STATE.without_casts():
            result = run(*args, **kwargs)
        if self.masters is not None:
            self.masters.publish()
        self.clear_master_grads()
        return result

    def _check_unscaled(self) -> None:
        """Reject a step whose gradients are still scaled."""
        if self._has_scaled and (self._pending_scale != 1 or self.pairs):
            raise AmpError(
                "optimizer.step() was called while its gradients are still scaled by "
                f"{self._pending_scale:g}: the last scale_loss before a step must "
                "leave delay_unscale=False."
            )

    def _check_masters_have_grads(self) -> None:
        """Reject a step without effect: no master weight has a gradient."""
        num_grads = sum(param.grad is not None for param, _ in self.pairs)
        if num_grads and all(master.grad is None for _, master in self.pairs):
            raise AmpError(
                f"gradients never went through amp.scale_loss: {num_grads} weights "
                "have one, no master has. Call backward() in `with amp.scale_loss("
                "loss, optimizer) as scaled_loss:`."
            )

    def clear_master_grads(self) -> None:
        """Free gradients of master weights, which model.zero_grad() does not clear."""
        for _, master in self.pairs:
            master.grad = None

    def zero_grad(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Clear the gradients of the model's parameters and of the master weights."""
        run(*args, **kwargs)
        self._saved_grads.clear()
        self._pending_scale = None
        for param, master in self.pairs:
            param.grad = master.grad = None

    def add_param_group(
        self, run: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Add parameters, with master weights if the others have them."""
        run(*args, **kwargs)
        before = len(self.pairs)
        if self.masters is not None:
            self.masters.add_new_params()
        models.record(self.pairs[before:])


def _add_grad(param: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, which may be missing or sparse."""
    grad = param.grad
    if grad is None:
        param.grad = gradient
    elif grad.is_sparse or gradient.is_sparse:
        param.grad = grad + gradient
    else:
        grad.add_(gradient)


def attach(optimizer: torch.optim.Optimizer, masters: MasterWeights | None) -> None:
    """Attach amp's state to an optimizer, and wrap its methods."""
    state = AmpOptimizerState(optimizer, masters)
    setattr(optimizer, ATTRIBUTE, state)
    for name in ("step", "zero_grad", "add_param_group"):
        method = _routed(getattr(optimizer, name), getattr(state, name))
        setattr(optimizer, name, MethodType(method, optimizer))


def _routed(own: Callable[..., Any], through: Callable[..., Any]) -> Callable[..., Any]:
    # Schedulers mark `step` (wraps copies the mark) and require a bound method.
    @functools.wraps(own)
    def method(_: object, *args: Any, **kwargs: Any) -> Any:
        return through(own, *args, **kwargs)

    return method


def state_of(optimizer: object) -> AmpOptimizerState:
    """Return amp's state of an optimizer."""
    state: AmpOptimizerState | None = getattr(optimizer, ATTRIBUTE, None)
    if state is None:
        raise AmpError(
            f"{type(optimizer).__name__} did not come from amp.initialize: pass it "
            "there once, before training, and use what it returns."
        )
    return state


# Loss scalers

FIRST_SCALE = 2.0**16


def rule_of(
    loss_scale: float | str, min_loss_scale: float | None, max_loss_scale: float
) -> ScaleRule:
    """Return the rule of a loss scale, "dynamic" or a constant.

    Without a minimum it is 1; apex had none, and its scale fell to 0.
    """
    if loss_scale != "dynamic":
        return ScaleRule.parse(loss_scale)
    first = min(max_loss_scale, FIRST_SCALE)
    floor = min_loss_scale or min(1.0, first)
    first = min(max(first, floor), max_loss_scale)
    return ScaleRule(first, min_scale=floor, max_scale=max_loss_scale)


class AmpScaler:
    """A loss scale with a found_inf flag that is not read yet, and its optimizers.

    `name_of` returns the name of a parameter.
    """

    def __init__(
        self,
        loss_id: int,
        rule: ScaleRule,
        device: torch.device,
        name_of: Callable[[Tensor], str],
    ) -> None:
        self.loss_id = loss_id
        self.scaler = LossScaler(rule, device)
        self._name_of = name_of
        self._found_inf: Tensor | None = None
        self._pending_optimizers: list[AmpOptimizerState] = []

    @property
    def dynamic(self) -> bool:
        """Whether the scale is dynamic."""
        return self.scaler.rule.backoff_factor < 1

    def loss_scale(self) -> float:
        """Return the scale. Synchronizes with the device."""
        return float(self.scaler.state.scale)

    @property
    def _loss_scale(self) -> float:
        """The scale, under a name that programs for apex read and set."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.set_state(value, self._unskipped)

    @property
    def _unskipped(self) -> int:
        return int(self.scaler.state.clean_steps)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.set_state(self.loss_scale(), value)

    def set_state(self, scale: float, unskipped: int) -> None:
        """Set the scale and the number of steps since the last overflow or growth."""
        state = self.scaler.state
        self.scaler.set_state(
            torch.full_like(state.scale, scale),
            torch.full_like(state.clean_steps, unskipped),
        )

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss in fp32, times the scale."""
        self.scaler.observe_loss(loss, self._name_of)
        return self.scaler.scale(loss)

    def unscale_(self, optimizers: list[AmpOptimizerState]) -> None:
        """Divide the gradients of one backward pass by the scale, and check them."""
        grads = [each.collect() for each in optimizers]
        found_inf = self.scaler.unscale_([g for part in grads for _, g in part])
        for each, part in zip(optimizers, grads, strict=True):
            each.add(part)
        if self._found_inf is not None:
            found_inf = torch.maximum(found_inf, self._found_inf)
        self._found_inf = found_inf
        for optimizer in optimizers:
            if optimizer not in self._pending_optimizers:
                self._pending_optimizers.append(optimizer)
                optimizer.unchecked.append(self)

    def finish_check(self) -> None:
        """Read found_inf, update the scale, and mark optimizers that must skip."""
        found_inf, optimizers = self._found_inf, self._pending_optimizers
        if found_inf is None:
            return
        self._found_inf, self._pending_optimizers = None, []
        for optimizer in optimizers:
            optimizer.unchecked.remove(self)
            if found_inf:
                optimizer.skipped_by = self
        self.scaler.update(
            found_inf, functools.partial(self._nonfinite_params, optimizers)
        )

    def _nonfinite_params(
        self, optimizers: list[AmpOptimizerState]
    ) -> tuple[NonFiniteParam, ...]:
        pairs = [
            (self._name_of(optimizer.stored(param)), param.grad)
            for optimizer in optimizers
            for group in optimizer.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        return find_nonfinite_params(pairs)

    def skip_message(self) -> str:
        """Return apex's message about a skipped step."""
        start = f"Gradient overflow.  Skipping step, loss scaler {self.loss_id}"
        if self.dynamic:
            return f"{start} reducing loss scale to {self.loss_scale()}"
        return f"{start} has a static loss scale of {self.loss_scale()}"

    def state_dict(self) -> dict[str, float | int]:
        """Return the two values that apex saves."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

"""Implements apex's older loss scalers, and its wrapper of an optimizer with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep import scaling
from halfstep.compat.apex import models
from halfstep.compat.apex.optimizer_state import AmpOptimizerState
from halfstep.compat.apex.state import AmpError, maybe_print
from halfstep.masters import MasterWeights
from halfstep.scaling import ScaleRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


class LossScaler:
    """A constant loss scale."""

    dynamic = False

    def __init__(self, scale: float = 1) -> None:
        self.core = scaling.LossScaler(ScaleRule.parse(scale))

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return float(self.core.state.scale)

    @property
    def cur_scale(self) -> float:
        """The same, under apex's other name."""
        return self.loss_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient is non-finite; apex's static one did not check."""
        grads = [param.grad for param in params if param.grad is not None]
        return not all(bool(grad.isfinite().all()) for grad in grads)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale for the next step."""
        self.core.update(torch.tensor(float(overflow)))

    def scale_gradient(
        self, _module: object, grad_in: tuple[Tensor, ...], _grad_out: object
    ) -> tuple[Tensor, ...]:
        """Multiply gradients by the scale: a full backward hook for modules."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the loss times the scale."""
        self.core.observe_loss(loss)
        self.core.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """A loss scale that falls on overflow, by `scale_factor`.

    It grows by it after `scale_window` steps without overflow.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
    ) -> None:
        rule = ScaleRule(
            init_scale,
            scale_factor,
            1 / scale_factor,
            scale_window,
            max_scale=torch.finfo(torch.float32).max,
        )
        self.core = scaling.LossScaler(rule)


class FP16_Optimizer:
    """An optimizer whose 16-bit parameters have fp32 master weights, and a loss scale.

    Args:
        init_optimizer: An optimizer over 16-bit or fp32 parameters, or both.
        static_loss_scale: The scale, unless it is dynamic.
        dynamic_loss_scale: Use a dynamic scale.
        dynamic_loss_args: Keyword arguments of `DynamicLossScaler`.
        verbose: Print a message about each skipped step.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler = LossScaler(static_loss_scale)
        if dynamic_loss_scale:
            self.loss_scaler = DynamicLossScaler(**(dynamic_loss_args or {}))
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self._groups = [list(group["params"]) for group in init_optimizer.param_groups]
        self._masters = MasterWeights(init_optimizer)
        self._optimizer_state = AmpOptimizerState(init_optimizer, self._masters)

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return self.loss_scaler.loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer, which contain the master weights."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the optimizer."""
        return self.optimizer.state

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The master weights of each parameter group."""
        masters = {id(low): master for low, master in self._masters.pairs}
        return [[masters[id(p)] for p in g if id(p) in masters] for g in self._groups]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803
        """Clear the gradients of the model's parameters and of the master weights."""
        self._optimizer_state.zero_grad(
            self.optimizer.zero_grad, set_to_none=set_grads_to_None
        )
        self.overflow = False

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of the scaled loss.

        Args:
            loss: The unscaled loss.
            update_master_grads: Unscale the gradients into those of the master weights;
                else call `update_master_grads` after the last of several passes.
            retain_graph: As for torch.
        """
        self._optimizer_state.prepare(self.loss_scale)
        self.loss_scaler.backward(loss, retain_graph=retain_graph)
        self._optimizer_state.delay(self.loss_scale)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale and check gradients, and add them to those of the master weights.

        `overflow` is not cleared: a later finite pass does not undo an overflow.
        """
        fresh = self._optimizer_state.collect()
        found_inf = self.loss_scaler.core.unscale_([gradient for _, gradient in fresh])
        self._optimizer_state.add(fresh)
        self.overflow = self.overflow or bool(found_inf)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clip gradients of the master weights; return their norm, -1 on overflow."""
        if self.overflow:
            return -1.0
        params = [p for group in self.param_groups for p in group["params"]]
        return float(torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type))

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients by group, unscaled; None after an overflow."""
        if self.overflow:
            maybe_print("gradients overflowed: there is nothing to inspect.")
            return None
        grads = [[p.grad for p in group["params"]] for group in self.param_groups]
        return [[g if g is None else g.detach() for g in part] for part in grads]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update master weights and model, unless a gradient is non-finite.

        Args:
            closure: Calls `backward` of this object; needs a static scale.

        Raises:
            AmpError: If a closure is given and the scale is dynamic.
            LossScaleCollapse: If skipping has gone on for too long.
        """
        if closure is not None:
            return self._step_with(closure)
        overflow, used = self.overflow, self.loss_scale
        self.overflow = False
        self.loss_scaler.update_scale(overflow)
        if overflow:
            if self.verbose:
                maybe_print(
                    f"OVERFLOW! Skipping step. Attempted loss scale: {used}, "
                    f"reducing to {self.loss_scale}"
                )
            self._optimizer_state.clear_master_grads()
            return None
        result = self.optimizer.step()
        self._masters.publish()
        self._optimizer_state.clear_master_grads()
        return result

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if self.dynamic_loss_scale:
            raise AmpError(
                f"{type(self.optimizer).__name__}.step was given a closure, and the "
                "loss scale is dynamic: set static_loss_scale for one."
            )

        def run() -> Any:
            if not self.first_closure_call_this_step:
                self._masters.publish()
            self.first_closure_call_this_step = False
            return closure()

        result: Any = self.optimizer.step(run)
        self.first_closure_call_this_step = True
        self._masters.publish()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return apex's fields; the loss scaler is saved as plain numbers."""
        return {
            "loss_scaler": self.loss_scaler.core.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. Load the model's weights before."""
        saved = [m for group in state_dict["fp32_from_fp16"] for m in group]
        own = [m for group in self.fp32_from_fp16_groups for m in group]
        if [tuple(m.shape) for m in saved] != [tuple(m.shape) for m in own]:
            raise AmpError(
                f"the state holds {len(saved)} masters, of other shapes than the "
                f"{len(own)} here: build the optimizer over the model that was saved."
            )
        self.loss_scaler.core.load_state_dict(state_dict["loss_scaler"])
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for master, value in zip(own, saved, strict=True):
            master.copy_(value)
        self._masters.publish()
        models.record(self._masters.pairs)

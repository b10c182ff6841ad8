"""Implements Lightning's precision plugins, for the Trainer and for Fabric.

They forward Lightning's hooks around forward pass, backward pass and optimizer step to
a `LevelEngine`.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from halfstep.compat.lightning.engine import LevelEngine
from halfstep.distributed import ddp
from halfstep.errors import UserError
from halfstep.numerics.formats import cast_floating

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.types import LRSchedulerConfig
    from torch.optim import Optimizer

    from halfstep.policy.rules import Policy
    from halfstep.scaling.loss_scale import ScaleRule
    from halfstep.scaling.step_report import StepReport


class _LevelPlugin(FabricPrecision):
    """What both plugins have: a `LevelEngine`, and the hooks that only call it."""

    _backward_call = "self.manual_backward(loss)"

    def __init__(
        self,
        level: str,
        *,
        dtype: str | torch.dtype = "bf16",
        policy: Policy | str = "lean",
        loss_scale: str | float | ScaleRule = "auto",
    ) -> None:
        self._engine = LevelEngine(
            level, dtype, policy, loss_scale, self._backward_call
        )
        self.precision = _precision_word(self._engine)

    @property
    def last_step(self) -> StepReport:
        """What the last optimizer step did; its properties may synchronize."""
        return self._engine.last_step

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward pass of training or evaluation."""
        return self._engine.forward_context()

    def convert_input(self, data: Any) -> Any:
        """Cast inputs to the 16-bit format at O3, which has no autocast."""
        level, format_ = self._engine.choice.level, self._engine.choice.format
        return cast_floating(data, format_.dtype) if level.low_inputs else data

    def backward(
        self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass of the scaled loss.

        Raises:
            LossScaleCollapse: If skipping has gone on for too long.
        """

        def run(scaled: Tensor) -> None:
            super(_LevelPlugin, self).backward(scaled, model, *args, **kwargs)

        self._engine.backward(tensor, run)

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale and step counters as plain values."""
        return self._engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load loss scale and counters."""
        self._engine.load_state_dict(state_dict)


class MixedPrecision(_LevelPlugin, Precision):
    """Precision plugin: trains a LightningModule at one of halfstep's levels.

    Steps that overflow are skipped with every dtype, also with fused optimizers, whose
    gradients can be clipped here. A learning-rate schedule per step is not stepped for
    a skipped one. `halfstep/steps_skipped` is logged, and with fp16
    `halfstep/loss_scale`. Checkpoints hold fp32 weights, and the module has fp32
    weights again after `fit`.

    Args:
        level: "O0" to "O3", as for `halfstep.prepare`.
        dtype: "bf16" or "fp16"; it has no effect at O0. Default bf16, which has fp32's
            range and needs no loss scale.
        policy: "lean", the same on every device, or "torch"; either with rules
            ("lean + module:head=fp32"), or a `Policy`.
        loss_scale: "dynamic", "none", a number, or a `ScaleRule`;
            "auto" is dynamic for fp16 and none otherwise.

    Raises:
        UserError: If an argument is unknown.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(
        ...     accelerator="cpu",
        ...     logger=False,
        ...     enable_progress_bar=False,
        ...     plugins=[MixedPrecision("O2", dtype="bf16")],
        ... )
        >>> trainer.precision
        'bf16-mixed'
    """

    _module: LightningModule | None = None
    _scheduled_at: dict[int, int]
    """id() of a schedule -> number of applied steps when it was last stepped."""
    _hooks_read_gradients = False
    """Whether user code runs between backward pass and update."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the module's weights as the level says."""
        self._engine.convert(module)
        return module

    def connect(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        lr_schedulers: list[LRSchedulerConfig],
    ) -> tuple[nn.Module, list[Optimizer], list[LRSchedulerConfig]]:
        """Give each optimizer master weights if the level has them."""
        engine = self._engine
        module = cast("LightningModule", ddp.unwrap(model))
        strategy = module.trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise UserError(
                f"strategy {type(strategy).__name__} beside halfstep's MixedPrecision: "
                "use one device or DDP, or give halfstep.prepare the sharded model."
            )
        if module.trainer.state.fn != TrainerFn.FITTING:
            # An evaluation after training keeps the optimizers.
            return model, optimizers, lr_schedulers
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning) and engine.choice.level.masters:
                raise UserError(
                    f"callback {type(callback).__name__} at {engine.choice}: it looks "
                    "for the module's parameters in the optimizer, which has their "
                    "master weights; use O1."
                )
        wrapper = ddp.find_ddp(model)
        engine.group = None if wrapper is None else wrapper.process_group
        engine.moves_grads = not module.automatic_optimization
        engine.entries.clear()
        self._scheduled_at = {}
        for optimizer in optimizers:
            engine.attach(optimizer)
        engine.drop_frozen()
        self._module = module
        self._wrap_methods(module)
        self._hooks_read_gradients = _hooks_read_gradients(module)
        if engine.choice.level.masters and self._hooks_read_gradients:
            warnings.warn(
                f"gradients at {engine.choice} are in optimizer.param_groups when "
                "on_before_optimizer_step and configure_gradient_clipping are called: "
                "16-bit weights in self.parameters() have none then.",
                stacklevel=2,
            )
        return model, optimizers, lr_schedulers

    def _wrap_methods(self, module: LightningModule) -> None:
        """Make schedules follow applied steps, and toggles apply to 16-bit weights."""
        step_schedule = module.lr_scheduler_step

        @wraps(step_schedule)
        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            configs = module.trainer.lr_scheduler_configs
            config = next(c for c in configs if c.scheduler is scheduler)
            entry = self._engine.entries.get(scheduler.optimizer)
            if config.interval == "step" and entry is not None:
                before = self._scheduled_at.get(id(scheduler), entry.first_applied)
                self._scheduled_at[id(scheduler)] = entry.num_applied
                if entry.num_applied == before:
                    return
            step_schedule(scheduler, metric)

        vars(module)["lr_scheduler_step"] = lr_scheduler_step
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            vars(module)[name] = self._toggle_weights_too(getattr(module, name))

    def _toggle_weights_too(self, toggle: Callable[[Any], None]) -> Callable[..., None]:
        @wraps(toggle)
        def method(optimizer: Any) -> None:
            toggle(optimizer)
            for entry in self._engine.entries.values():
                for weight, master in entry.step.masters.pairs:
                    weight.requires_grad = master.requires_grad

        return method

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then update the weights unless a gradient is inf or NaN."""
        _reject_arguments(kwargs, "leave it out")
        result = closure()
        if self._hooks_read_gradients:
            self._engine.unscale(optimizer)
        self._after_closure(model, optimizer)
        # `training_step` may return None to skip a batch.
        if result is not None or not model.automatic_optimization:
            self._engine.step(optimizer)
            self._log(model)
        return result

    def _log(self, model: LightningModule) -> None:
        if model.trainer.barebones:
            return
        engine = self._engine
        skipped = sum(entry.num_skipped for entry in engine.entries.values())
        model.log("halfstep/steps_skipped", skipped, on_step=True, on_epoch=False)
        if engine.rule.scales:
            scale = engine.last_step.scale_used
            model.log("halfstep/loss_scale", scale, on_step=True, on_epoch=False)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled gradients; clipping by norm is done in the update itself."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        entry = self._engine.entry(optimizer)
        by_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
        if by_norm and entry.checked is None:
            entry.step.clip = float(clip_val) if clip_val > 0 else None
        elif clip_val > 0:
            self._engine.unscale(optimizer)
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def teardown(self) -> None:
        """Convert the weights back to fp32."""
        module, self._module = self._module, None
        if module is not None:
            for name in ("lr_scheduler_step", "toggle_optimizer", "untoggle_optimizer"):
                vars(module).pop(name, None)
        self._engine.release()


class FabricMixedPrecision(_LevelPlugin):
    """Precision plugin: trains models of `Fabric.setup` at one of halfstep's levels.

    Steps that overflow are skipped with every dtype; `last_step` reports them. Compute
    losses from the model's fp32 outputs, or in `fabric.autocast()`. Add the plugin to
    the state of `fabric.save` and `fabric.load`: it holds the loss scale.

    The arguments are those of `MixedPrecision`.

    Example:
        >>> from lightning.fabric import Fabric
        >>> plugin = FabricMixedPrecision("O2", dtype="bf16")
        >>> fabric = Fabric(accelerator="cpu", plugins=[plugin])
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
        >>> fabric.backward(model(torch.ones(1, 2)).sum())
        >>> optimizer.step()
        >>> plugin.last_step.applied
        True
    """

    _backward_call = "fabric.backward(loss)"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store a module's weights as the level says."""
        self._engine.convert(module, separate=True)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._engine.group = dist.group.WORLD
        return module

    def convert_output(self, data: Any) -> Any:
        """Return outputs in fp32, for a loss outside of the autocast context."""
        return cast_floating(data, torch.float32)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> None:
        """Update the weights unless a gradient is inf or NaN."""
        _reject_arguments(kwargs, "compute the gradients before it")
        self._engine.step(optimizer)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale gradients before they are clipped."""
        self._engine.unscale(optimizer)


def _reject_arguments(kwargs: dict[str, Any], advice: str) -> None:
    if kwargs:
        message = f"optimizer.step() takes no {', '.join(kwargs)} here: {advice}."
        raise UserError(message)


def _hooks_read_gradients(module: LightningModule) -> bool:
    """Return whether user code runs between backward pass and update."""
    own = ("on_before_optimizer_step", "configure_gradient_clipping")
    callbacks: list[Any] = vars(module.trainer)["callbacks"]
    return any(is_overridden(name, module) for name in own) or any(
        is_overridden(own[0], callback) for callback in callbacks
    )


def _precision_word(engine: LevelEngine) -> Any:
    """Return the closest value of Lightning's `precision=`."""
    choice = engine.choice
    if not choice.level.low:
        return "32-true"
    word = "bf16" if choice.format.dtype == torch.bfloat16 else "16"
    return f"{word}-mixed" if choice.level.autocast else f"{word}-true"

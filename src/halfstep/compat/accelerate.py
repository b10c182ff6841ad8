"""Provides Accelerate's `Accelerator`, training in a halfstep session.

This adds the levels O0 to O3, checks gradients in bf16 too, and makes
`step_was_skipped` correct for every optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch

from halfstep.compat import library_names, require

require("accelerate", "1.10")

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_outputs_to_fp32

from halfstep.casting.autocast_mode import autocast
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.reporting.table import format_count
from halfstep.scaling import ScaleRule
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from halfstep.scaling.step_report import StepReport
    from halfstep.session.session import Session

__all__ = ["Accelerator", "Optimizer"]

_DISTRIBUTED = {"NO", "MULTI_CPU", "MULTI_GPU"}
_DTYPES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that `Accelerator.prepare` returns; its step is the session's.

    Its state is the session's: fp32 weights, moments, loss scale and counters. A
    program that saves and loads it resumes bit-exactly.

    Attributes:
        session: The `halfstep.Session` that trains.
        last_step: Report of the last step; None before the first.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session.optimizer, device_placement=False)
        self.session = session
        self.last_step: StepReport | None = None

    def step(self, closure: object = None) -> None:
        """Update the weights if gradients are synchronized, as Accelerate does.

        Raises:
            UserError: With a closure, whose backward passes would not be scaled.
        """
        if closure is not None:
            raise UserError(
                "optimizer.step(closure) under halfstep.compat.accelerate: a closure "
                "runs with halfstep.GradScaler.step(optimizer, closure) alone."
            )
        if self.gradient_state.sync_gradients:
            self.last_step = self.session.step()
            self.session.clip_grad_norm = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: ARG002
        """Free gradients if they are synchronized; `step` has already freed them."""
        if self.gradient_state.sync_gradients:
            self.session.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. May synchronize with the device."""
        return self.last_step is not None and self.last_step.skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state."""
        return self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a session's state."""
        self.session.load_state_dict(state_dict)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` that trains in a halfstep session.

    It accepts the arguments of Accelerate's class. `mixed_precision`, or the setting of
    `accelerate launch`, is the dtype. Prepare one model and its optimizer in one call;
    a `GradScalerKwargs` handler sets the loss scale of fp16.

    Args:
        args: Arguments of Accelerate's class.
        level: "O0" to "O3", or "auto". None: O1 with a 16-bit dtype and O0 for "no", as
            Accelerate itself does.
        policy: As for `halfstep.prepare`.
        master: As for `halfstep.prepare`, at O2.
        kwargs: Arguments of Accelerate's class.

    Raises:
        UserError: With DeepSpeed, FSDP, Megatron, an accelerator of another maker, or
            `mixed_precision="fp8"`.

    Example:
        >>> from halfstep.compat.accelerate import Accelerator
        >>> accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(1, 2)).sum())
        >>> optimizer.step()
        >>> optimizer.step_was_skipped
        False
    """

    session: Session | None
    """The session of the prepared model and optimizer; None before `prepare`."""

    def __init__(
        self,
        *args: Any,
        level: str | None = None,
        policy: str = "lean",
        master: str = "fp32",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.set_precision(level, policy, master)

    def set_precision(self, level: str | None, policy: str, master: str) -> None:
        """Disable casts and scaler of Accelerate; call it before `prepare`."""
        requested = self.mixed_precision
        if requested not in _DTYPES or self.distributed_type.value not in _DISTRIBUTED:
            raise UserError(
                f"mixed_precision={requested!r} on {self.distributed_type.value}: "
                "halfstep.compat.accelerate takes no, bf16 or fp16 on one process or "
                "under DDP."
            )
        self.native_amp, self.scaler = False, None
        self._level = level or ("O0" if requested == "no" else "O1")
        self._dtype = "auto" if requested == "no" and level else _DTYPES[requested]
        self._policy, self._master = policy, master
        self.session = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as Accelerate does; make a session of model and optimizer.

        Raises:
            UserError: If a model has no optimizer, there are several of either, or a
                second pair is prepared before `free_memory`.
        """
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if not models and not optimizers:
            return super().prepare(*args, **kwargs)
        if len(models) != 1 or len(optimizers) != 1 or self.session is not None:
            counts = (models, "model"), (optimizers, "optimizer")
            given = " and ".join(format_count(len(some), word) for some, word in counts)
            if self.session is not None:
                given += " after a first pair"
            raise UserError(
                f"accelerator.prepare() got {given}: give it one model and its "
                "optimizer, in one call. Several of them have a halfstep.prepare() "
                "each."
            )
        (model,), (optimizer,) = models, optimizers
        if self.device_placement:
            model.to(self.device)
        self.session = session = prepare(
            model,
            optimizer,
            self._level,
            dtype=self._dtype,
            policy=self._policy,
            master=self._master,
            loss_scale=self._loss_scale(),
        )
        session.backward_call = "accelerator.backward(loss)"
        _run_in_context(model, session.autocast)
        prepared = super().prepare(*args, **kwargs)
        # There are two objects or more: Accelerate returns a tuple.
        session.model = next(m for m in prepared if isinstance(m, torch.nn.Module))
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return the session's optimizer."""
        if self.session is None or optimizer is not self.session.optimizer:
            return super().prepare_optimizer(optimizer, device_placement)
        wrapped = Optimizer(self.session)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model; one without optimizer runs under autocast by the policy."""
        casts = self._dtype in {"bf16", "fp16"} and self._level != "O0"
        if self.session is None and casts:
            dtype, policy = formats.parse(self._dtype).dtype, self._policy
            context = autocast(self.device.type, dtype, policy=policy, model=model)
            _run_in_context(model, lambda: context)
        prepared: nn.Module = super().prepare_model(
            model, device_placement, evaluation_mode
        )
        return prepared

    def _loss_scale(self) -> str | ScaleRule:
        handler = self.scaler_handler
        if handler is None or self._dtype != "fp16" or not handler.enabled:
            return "auto"
        factors = handler.growth_factor, handler.backoff_factor
        return ScaleRule(handler.init_scale, *factors, handler.growth_interval)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Enter the autocast context, for a loss computed outside the model."""
        handler = autocast_handler or self.autocast_handler
        if self.session is None or (handler is not None and not handler.enabled):
            with super().autocast(autocast_handler):
                yield
        else:
            with self.session.autocast():
                yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of the loss over `gradient_accumulation_steps`."""
        session = self._require_session("backward")
        if kwargs:
            raise UserError(
                f"accelerator.backward({', '.join(kwargs)}=): it takes the loss alone."
            )
        # Gradients of passes between two steps are summed: fp32 for 16-bit weights.
        session.backward(loss / self.gradient_accumulation_steps)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Disable gradient averaging in a pass, except with master weights.

        With master weights, gradients are summed in fp32 outside of `.grad`, where DDP
        cannot average them later.
        """
        session = self.session
        if session is not None and session.choice.level.masters:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = super().no_sync(model)
        return context

    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> Tensor:
        """Return the norm of the unscaled gradients; the next step clips to `max_norm`.

        Raises:
            UserError: If `parameters` are not all, or `norm_type` is not 2.
        """
        session = self._require_session("clip_grad_norm_")
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        ids = set(map(id, given))
        trained = [p for p in session.model.parameters() if p.requires_grad]
        missing = sum(id(param) not in ids for param in trained)
        if missing or norm_type != 2:  # noqa: PLR2004
            raise UserError(
                f"clip_grad_norm_() without {missing} of {len(trained)} parameters, "
                f"norm_type={norm_type}: a session clips all of a model's gradients by "
                "their 2-norm."
            )
        session.clip_grad_norm = max_norm
        return session.grad_norm()

    def clip_grad_value_(self, parameters: object, clip_value: float) -> None:  # noqa: ARG002
        """Raise UserError: a session clips by the norm."""
        message = f"clip_grad_value_({clip_value}): use accelerator.clip_grad_norm_()."
        raise UserError(message)

    def unscale_gradients(self, optimizer: object = None) -> None:  # noqa: ARG002
        """Raise UserError: the step unscales; `session.grads()` returns gradients."""
        raise UserError(
            "accelerator.unscale_gradients(): the step unscales gradients. Read them "
            "with accelerator.session.grads(), clip them with clip_grad_norm_()."
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the fp32 weights, which are the master weights if there are any."""
        session, inner = self.session, accelerate.utils.extract_model_from_parallel
        if session is None or inner(model) is not inner(session.model):
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        prefix = "" if unwrap or inner(model) is model else "module."
        return {prefix + name: tensor for name, tensor in session.weights().items()}

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Restore what `save_state` saved, with the fp32 weights of the session."""
        with warnings.catch_warnings():
            # safetensors reads names from `model.state_dict()`, and saves nothing.
            warnings.filterwarnings("ignore", r"model.state_dict\(\) holds")
            super().load_state(*args, **kwargs)

    def free_memory(self, *objects: object) -> list[object]:
        """Release all prepared objects and the session."""
        self.session = None
        freed: list[object] = super().free_memory(*objects)
        return freed

    def _require_session(self, method: str) -> Session:
        if self.session is None:
            raise UserError(
                f"accelerator.{method}() before accelerator.prepare(model, optimizer): "
                "a session scales, checks and clips gradients."
            )
        return self.session


def _run_in_context(model: nn.Module, open_context: Any) -> None:
    """Wrap a model's forward in a context, and cast its outputs to fp32."""
    forward = model.forward
    function = getattr(forward, "__func__", None)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with open_context():
            return (function or forward)(*args, **kwargs)

    wrapped = convert_outputs_to_fp32(run)
    # Bound to the model, so that `copy.deepcopy` binds it to the copy.
    model.forward = types.MethodType(wrapped, model) if function else wrapped


__getattr__, __dir__ = library_names(accelerate, globals())

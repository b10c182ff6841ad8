"""Detects what is left of a training loop without a session, or with `torch.amp`.

Hooks explain dtype errors of forward passes outside of autocast, warn of a `state_dict`
without master weights, and raise or warn on a call of `optimizer.step()`.
"""

from __future__ import annotations

import functools
import gc
import re
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep._torch import optimizer_hooks
from halfstep._torch.optimizer_params import first_gradient
from halfstep.casting.convert_model import DtypeErrorHook, called_modules
from halfstep.casting.module_rules import LevelHook
from halfstep.errors import UserError, warn_caller
from halfstep.nonfinite.graph import saved_value
from halfstep.numerics.formats import is_low
from halfstep.session.chained_optimizer import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep.machine.recommendation import Choice
    from halfstep.masters import MasterWeights
    from halfstep.scaling import LossScaler
    from halfstep.session.optimizer_step import AccumulationWindow


def attach(
    session: object, model: nn.Module, choice: Choice, device: str, *, masters: bool
) -> None:
    """Register the hooks on a converted model."""
    stored = f"{choice.format.name} (level {choice.level.name})"
    advice = "copy it before prepare(), and load session.weights() into the copy"
    copy_warning = CopyWarning(choice.format.name, advice, weakref.ref(session))
    hook = LowStateDictHook(choice.format.name)
    for each in called_modules(model):
        if choice.level.low_weights and choice.level.autocast:
            error_hook = DtypeErrorHook(stored, device)
            each.register_forward_hook(error_hook, always_call=True)
        if masters:
            each.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    for module in model.modules() if masters else ():
        is_scripted = isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
        own = module.parameters(recurse=False)
        if not is_scripted and any(is_low(param.dtype) for param in own):
            # A hook, as what copies a module copies its hooks.
            module.register_state_dict_post_hook(copy_warning)  # type: ignore[no-untyped-call]


class CopyWarning(LevelHook):
    """Warns once if a module that refers to it is copied with `copy.deepcopy`.

    Pickling does not warn; in copies and pickles it is inactive. `advice` is what to do
    instead. `is_active` returns a false value once the weights have no masters anymore.
    """

    def __init__(
        self, dtype: str, advice: str, is_active: Callable[[], object] | None = None
    ) -> None:
        self._arguments = dtype, advice
        self._is_active = is_active

    def __call__(self, *_: object) -> None:
        """Do nothing: as a state-dict hook it only belongs to its module."""

    def __deepcopy__(self, _: object) -> CopyWarning:
        is_active, self._is_active = self._is_active, None
        if is_active is not None and is_active():
            dtype, advice = self._arguments
            warn_caller(
                f"the copy of the model holds {dtype} weights, in which an average "
                f"(EMA, SWA) or a target network loses small updates: {advice}."
            )
        return CopyWarning(*self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopyWarning, self._arguments


class LowStateDictHook(LevelHook):
    """State-dict hook: warns once that the state has 16-bit weights.

    In copies and pickles of the model, which have no session, it is inactive.
    """

    def __init__(self, dtype: str, *, active: bool = True) -> None:
        self._dtype = dtype
        self._active = active

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _meta: object
    ) -> None:
        """Check a state that is about to be returned."""
        if not self._active:
            return
        # Not buffers: the model itself may store those in 16 bits.
        named = module.named_parameters(remove_duplicate=False)
        values = (state.get(f"{prefix}{name}") for name, _ in named)
        copies = (v for v in values if not isinstance(v, nn.Parameter))  # `keep_vars`
        if any(isinstance(v, Tensor) and is_low(v.dtype) for v in copies):
            self._active = False
            warn_caller(
                f"model.state_dict() holds {self._dtype} weights: use "
                "session.weights() for their fp32 values, or session.state_dict() to "
                "resume training."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(LowStateDictHook, active=False), (self._dtype,)


def check_external_steps(
    masters: MasterWeights, scaler: LossScaler, window: AccumulationWindow
) -> None:
    """From now on, raise if `optimizer.step()` by hand is wrong; otherwise warn once.

    The check belongs to the optimizer, which may outlive the session. A step without
    any gradient is harmless, and avoids warnings of schedulers.
    """
    rule, window_reference, warned = scaler.rule, weakref.ref(window), False

    def check() -> None:
        nonlocal warned
        if masters.stepping:
            return
        if any(w.grad is not None or m.grad is not None for w, m in masters.pairs):
            raise UserError(
                "optimizer.step() was called while the session holds gradients of "
                "16-bit weights: call session.step(), which unscales and clips them, "
                "steps, and copies back to the model weights."
            )
        window = window_reference()
        if first_gradient(masters.optimizer) is None or window is None:
            return
        if window.num_pending and rule.scales:
            raise UserError(
                "optimizer.step() was called after session.backward(), whose gradients "
                "are multiplied by the loss scale: call session.step(), which unscales "
                "them."
            )
        if warned or not (rule.scales or window.num_pending):
            return
        warned = True
        if window.num_pending:
            warn_caller(
                "optimizer.step() was called after session.backward(): it neither "
                "clips, nor skips inf and NaN, nor waits for all micro-batches, nor "
                "steps the schedule. Call session.step() instead."
            )
        else:
            warn_caller(
                "optimizer.step() was called in place of session.step(): unless "
                "another scaler scales the loss, small gradients become zero in fp16. "
                "Call session.backward(loss), then session.step()."
            )

    for each in optimizers_of(masters.optimizer):
        optimizer_hooks.register_pre_step_check(each, check)


def check_not_scaled(loss: Tensor) -> None:
    """Raise if a `GradScaler` has scaled a loss or a term of it.

    The factor must be the tensor that some scaler holds, so that a loss weight is never
    mistaken for it.
    """
    nodes: list[Any] = [loss.grad_fn]
    for node in islice(nodes, 32):  # the list grows: breadth first
        operation = _MAY_FOLLOW_SCALE.match(type(node).__name__)
        if operation is None:
            continue
        is_product = operation[1] == "Mul"
        if is_product and _is_scale_of_grad_scaler(saved_value(node, "_saved_other")):
            raise UserError(
                "session.backward() was given scaler.scale(loss), and would scale it "
                "again: call session.backward(loss), and delete the GradScaler."
            )
        nodes.extend(following for following, _ in node.next_functions)


_MAY_FOLLOW_SCALE = re.compile(
    "(Add|Div|Mean|Mul|Neg|Squeeze|Stack|Sub|Sum|ToCopy|Unsqueeze|View)Backward"
)


def _is_scale_of_grad_scaler(factor: Tensor | float | None) -> bool:
    """Return whether a `GradScaler` refers to a tensor, directly or by `vars()`.

    Under dispatch modes, torch saves Python numbers as floats.
    """
    if not isinstance(factor, Tensor):
        return False
    if factor.numel() != 1 or factor.dtype != torch.float32:
        return False
    return any(
        isinstance(each, GradScaler)
        or (isinstance(each, dict) and "_growth_tracker" in each)
        for each in gc.get_referrers(factor)
    )

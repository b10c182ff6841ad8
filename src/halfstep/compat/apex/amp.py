"""Implements `apex.amp`: `initialize`, `scale_loss` and their checkpoints."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch.optimizer_params import unnamed
from halfstep.compat.apex import models as model_casts
from halfstep.compat.apex import optimizer_state, properties
from halfstep.compat.apex.amp_handle import (
    AmpHandle,
    clear_cache_if_evaluating,
    devices_of,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from halfstep.compat.apex.optimizer_state import AmpScaler, rule_of
from halfstep.compat.apex.state import STATE, AmpError, Properties, maybe_print
from halfstep.errors import require_int
from halfstep.masters import MasterWeights
from halfstep.scaling.loss_scale import check_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

__all__ = [
    "AmpError",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

_amp_state = STATE


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers to train at one of apex's levels.

    Call it once, before models are wrapped for data parallelism. A second call
    replaces level, loss scalers and casts; optimizers keep their master weights.

    Args:
        models: One model, or a list or tuple of models, on any device.
        optimizers: One optimizer, a list or tuple, or None for evaluation only.
        enabled: False turns this call and `scale_loss` into no-ops.
        opt_level: "O0" fp32, "O1" casts, "O2" fp16 with fp32 master weights, "O3" fp16.
        cast_model_type: Dtype of weights and inputs; False does not cast them.
        patch_torch_functions: False turns off the casts of O1.
        keep_batchnorm_fp32: A bool, or "True" or "False".
        master_weights: Update fp32 copies of 16-bit weights.
        loss_scale: "dynamic" or a number, also as a string.
        cast_model_outputs: Dtype of the outputs of models.
        num_losses: Number of losses with a scale each, for `loss_id` of `scale_loss`.
        verbosity: 0 prints nothing.
        min_loss_scale: Smallest loss scale. Default 1; apex had no minimum.
        max_loss_scale: Largest loss scale.

    Returns:
        Models and optimizers, in containers of the same type; only the models if there
        are no optimizers.

    Raises:
        AmpError: If an argument cannot be used; a `RuntimeError` and `ValueError`.
        UserError: If a number is out of its range.
        TypeError: If there are no models, or no optimizers, in an argument.

    Example:
        >>> from halfstep.compat.apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, "O1", verbosity=0)
        >>> with amp.scale_loss(model(torch.ones(2)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> _ = amp.initialize(model, enabled=False)  # amp casts nothing from here on
    """
    STATE.verbosity = verbosity
    if not enabled:
        _replace(properties.OFF, [])
        return models if optimizers is None else (models, optimizers)
    properties_ = properties.choose(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    num_losses = require_int("num_losses", num_losses, 1)
    model_list: list[nn.Module] = _listed(models, nn.Module, "models")
    optimizer_list: list[Any] = _listed(optimizers, torch.optim.Optimizer, "optimizers")
    _check(model_list, optimizer_list)
    rule = rule_of(properties_.loss_scale, min_loss_scale, max_loss_scale)
    maybe_print(f"Selected optimization level {opt_level}", rank0=True)
    tensors = [tensor for net in model_list for tensor in net.parameters()]
    device = tensors[0].device if tensors else torch.device("cpu")
    names = _names(model_list)
    scalers = [AmpScaler(i, rule, device, names) for i in range(num_losses)]
    _replace(properties_, scalers)
    originals = _cast(model_list, properties_, cast_model_outputs)
    for optimizer in optimizer_list:
        masters = (
            MasterWeights(optimizer, originals) if properties_.master_weights else None
        )
        if masters is None and properties_.cast_model_type and optimizer.state:
            # Moments loaded before take the dtype of their parameters.
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer_state.attach(optimizer, masters)
    if properties_.patch_torch_functions:
        STATE.handle = AmpHandle(devices_of(tensors))
        for model in model_list:
            model.register_forward_pre_hook(clear_cache_if_evaluating)
    return models if optimizers is None else (models, optimizers)


def _replace(chosen: Properties, scalers: list[AmpScaler]) -> None:
    """Activate a level, and end the casts of the previous one."""
    STATE.opt_properties = chosen
    STATE.loss_scalers = scalers
    if STATE.handle is not None:
        STATE.handle.close()


def _listed(value: Any, kind: type, name: str) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if value is None and name == "optimizers":
        return []
    if isinstance(value, list | tuple):
        wrong = [each for each in value if not isinstance(each, kind)]
        if not wrong:
            return list(value)
        value = wrong[0]
    raise TypeError(
        f"{name}: {type(value).__name__} is no {kind.__name__}; pass one, or a "
        "list or tuple of them."
    )


def _check(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        if hasattr(optimizer, optimizer_state.ATTRIBUTE):
            raise AmpError(
                f"this {type(optimizer).__name__} went through amp.initialize before: "
                "pass each optimizer once, and all of them in one call."
            )
    model_casts.check(models, fp32=not STATE.allow_incoming_model_not_fp32)


def _names(models: Sequence[nn.Module]) -> Callable[[Tensor], str]:
    names = {
        id(param): name if len(models) == 1 else f"model {number}: {name}"
        for number, model in enumerate(models)
        for name, param in model.named_parameters()
    }

    def name_of(param: Tensor) -> str:
        return names.get(id(param)) or unnamed(param)

    return name_of


def _cast(
    models: Sequence[nn.Module], chosen: Properties, outputs: torch.dtype | None
) -> dict[nn.Parameter, Tensor]:
    """Cast models; return the fp32 values of weights that are now 16-bit."""
    originals: dict[nn.Parameter, Tensor] = {}
    for model in models:
        dtype = chosen.cast_model_type
        if isinstance(dtype, torch.dtype):
            keep = bool(chosen.keep_batchnorm_fp32)
            originals |= model_casts.cast_(model, dtype, keep_batchnorm=keep)
            outputs = outputs or torch.float32
        elif chosen.master_weights:
            model_casts.keep_fp32_state(model)
        if outputs is not None:
            model.register_forward_hook(partial(model_casts.cast_output, outputs))
    return originals if chosen.master_weights else {}


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients afterwards.

    `initialize` has an example. Gradients of earlier passes are added after unscaling,
    so that sums are exact with different scales too.

    Args:
        loss: The unscaled loss.
        optimizers: The optimizers whose parameters get gradients in this pass: one, or
            a list or tuple.
        loss_id: Number of the loss scaler, below `num_losses`.
        model: Not used, as in apex.
        delay_unscale: Leave the gradients scaled; a later pass before the step must
            unscale them.
        delay_overflow_check: Check the gradients at `optimizer.step` or the next pass,
            so that this pass does not synchronize with the device.

    Raises:
        AmpError: If amp or an optimizer is not initialised, or there is no such loss.
        LossScaleCollapse: If every step is skipped and no smaller scale helps.
    """
    del model
    chosen = STATE.opt_properties
    if chosen is None:
        raise AmpError(
            "amp.scale_loss was called before amp.initialize: call model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not chosen.enabled:
        yield loss
        return
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    states = [optimizer_state.state_of(each) for each in given]
    scaler = _scaler(loss_id)
    scale = scaler.loss_scale()
    for one in states:
        one.prepare(scale)
    try:
        with STATE.without_casts():
            yield scaler.scale(loss)
    except BaseException:
        for one in states:
            one.restore()
        raise
    finally:
        if STATE.handle is not None:
            STATE.handle.clear_cache()
    if delay_unscale:
        for one in states:
            one.delay(scale)
        return
    scaler.unscale_(states)
    if not delay_overflow_check:
        scaler.finish_check()


def _scaler(loss_id: int) -> AmpScaler:
    if not 0 <= loss_id < len(STATE.loss_scalers):
        raise AmpError(
            f"loss_id={loss_id} must be below num_losses={len(STATE.loss_scalers)}: "
            "pass num_losses to amp.initialize."
        )
    scaler: AmpScaler = STATE.loss_scalers[loss_id]
    return scaler


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Turn off the casts of O1 in a `with` block."""
    with STATE.without_casts():
        yield


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer updates, master weights included."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of the loss scalers in apex's format, in `destination`."""
    state = {} if destination is None else destination
    for number, scaler in enumerate(STATE.loss_scalers):
        state[f"loss_scaler{number}"] = scaler.state_dict()
    return state


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load the state of the loss scalers, also from checkpoints of apex.

    A constant scale stays as the level sets it. Entries beyond `num_losses` are ignored
    with a message.

    Raises:
        AmpError: If there are other keys.
        UserError: If a scale is not a positive number; nothing is loaded then.
    """
    scalers = STATE.loss_scalers
    if len(state_dict) != len(scalers):
        maybe_print(
            f"Warning: state_dict contains {len(state_dict)} entries, while "
            f"{len(scalers)} loss_scalers are used"
        )
    unknown = [key for key in state_dict if not re.fullmatch(r"loss_scaler\d+", key)]
    if unknown:
        message = f"amp's state holds {unknown}; keys must be loss_scaler0, 1, ..."
        raise AmpError(message)
    for key, saved in state_dict.items():
        check_scale(f"{key}'s scale", saved["loss_scale"])
    for key, saved in state_dict.items():
        number = int(key.removeprefix("loss_scaler"))
        if number >= len(scalers):
            maybe_print(
                f"Skipping loss_scaler[{number}], since num_losses was {len(scalers)}"
            )
        else:
            scaler = scalers[number]
            scale = saved["loss_scale"] if scaler.dynamic else scaler.loss_scale()
            scaler.set_state(scale, saved["unskipped"])

"""Saves and loads the state of a session: tensors and plain values.

Weights are saved in fp32 at every level, so that a session of another level or master
encoding can load them.
"""

from __future__ import annotations

import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch.optimizer_params import params_of
from halfstep.casting import convert_model
from halfstep.errors import UserError, require_type
from halfstep.numerics.formats import is_low
from halfstep.session import fsdp

if TYPE_CHECKING:
    from contextlib import ExitStack

    from halfstep.machine.recommendation import Choice
    from halfstep.masters import MasterWeights

VERSION = 3
KEYS = (
    *("dtype", "weights", "outside", "optimizer", "scaler", "steps", "schedule"),
    *("parameters", "moments", "masters", "extra"),
)
INNER = {
    "optimizer": ("state", "param_groups"),
    "steps": ("attempted", "skipped"),
    "masters": ("form", "seed", "step", "low"),
    "schedule": ("followed", "state"),
}
COUNTS = ("attempted", "skipped", "followed", "seed", "step")
"""Integers among them."""
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""State of torch's optimizers with the shape of the parameter."""
SCALARS = ("step", "mu_product", "eta", "mu")
"""State of torch's optimizers that is a scalar."""


def weights(model: nn.Module, masters: MasterWeights) -> dict[str, Tensor]:
    """Return every weight and buffer by name, those stored in 16 bits in fp32.

    The fp32 values are the master weights if there are any, else upcasts. Tied weights
    are one tensor.
    """
    masters.sync_external_writes()
    fp32_tensors = _in_fp32(stored_tensors(model), masters)
    return fp32_tensors | {n: e for n, e in _extra(model).items() if torch.is_tensor(e)}


@torch.no_grad()
def _in_fp32(tensors: dict[str, Tensor], masters: MasterWeights) -> dict[str, Tensor]:
    """Return tensors by name, those in 16 bits as their master weights or in fp32."""
    by_weight = masters.by_weight_id()
    fp32_tensors: dict[str, Tensor] = {}
    converted: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in converted:
            slot = by_weight.get(id(tensor))
            value = tensor.detach() if slot is None else masters.fp32_value(slot.master)
            converted[id(tensor)] = value.float() if is_low(value.dtype) else value
        fp32_tensors[name] = converted[id(tensor)]
    return fp32_tensors


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, as they are stored."""
    state = model.state_dict(keep_vars=True)
    named = {name: state[name] for name in state if not _is_extra(name)}
    return {name: t for name, t in named.items() if isinstance(t, Tensor)}


def _extra(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of modules (`get_extra_state`)."""
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for name in state if _is_extra(name)}


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def _outside(model: nn.Module, masters: MasterWeights) -> dict[str, Tensor]:
    """Return the optimizer's parameters that are not in the model, named by number.

    A temperature in the loss is one.
    """
    in_model = {id(tensor) for tensor in stored_tensors(model).values()}
    params = map(masters.model_param, params_of(masters.optimizer))
    return {
        f"{number} of the optimizer": param
        for number, param in enumerate(params)
        if id(param) not in in_model
    }


def _parameters(model: nn.Module, masters: MasterWeights) -> dict[str, int]:
    """Return name -> group number of the optimizer's parameters, in order."""
    names: dict[int, str] = {}
    for name, tensor in (stored_tensors(model) | _outside(model, masters)).items():
        names.setdefault(id(tensor), name)
    return {
        names[id(masters.model_param(param))]: number
        for number, group in enumerate(masters.optimizer.param_groups)
        for param in group["params"]
    }


def save(model: nn.Module, masters: MasterWeights, choice: Choice) -> dict[str, Any]:
    """Return weights, optimizer state, and the rounding state for bit-exact resume."""
    masters.add_new_params()
    masters.sync_external_writes()
    by_weight, low = masters.by_weight_id(), {}
    outside = _outside(model, masters)
    if masters.encoding.residual == torch.bfloat16:
        # The fp32 sum does not determine weight and compensation term: save weights.
        stored = (stored_tensors(model) | outside).items()
        low = {name: t.detach() for name, t in stored if id(t) in by_weight}
    optimizer = masters.optimizer.state_dict()
    extra = _extra(model).items()
    return {
        "version": VERSION,
        "level": choice.level.name,
        "dtype": choice.format.name,
        "weights": weights(model, masters),
        "outside": _in_fp32(outside, masters),
        "extra": {name: value for name, value in extra if not torch.is_tensor(value)},
        "optimizer": optimizer,
        "parameters": _parameters(model, masters),
        "moments": len(optimizer["state"]),
        "masters": {
            "form": _encoding_name(masters),
            "seed": masters.rng.seed,
            "step": masters.rng.step,
            "low": low,
        },
    }


@torch.no_grad()
def first_moments(model: nn.Module, masters: MasterWeights) -> dict[str, Tensor]:
    """Return the moments of the optimizer before its first step, by parameter and key.

    It takes a step with zero gradients and learning rate 0, and undoes it.
    """
    masters.add_new_params()
    optimizer, rng = masters.optimizer, masters.rng
    rates = [group["lr"] for group in optimizer.param_groups]
    params = params_of(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if torch.is_tensor(rate) else 0.0
    for param in params:
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    try:
        masters.step()
        return {
            f"{name}/{key}": value
            for name, param in zip(_parameters(model, masters), params, strict=True)
            for key, value in optimizer.state[param].items()
            if torch.is_tensor(value) and value.dim() > 0
        }
    finally:
        optimizer.state.clear()
        optimizer.zero_grad()
        masters.set_rng(rng.seed, rng.step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def check(state: dict[str, Any], model: nn.Module, masters: MasterWeights) -> None:
    """Raise if a state cannot be loaded."""
    if "version" not in state:
        raise UserError(
            "this is not the state of a session. Load states of a model and of an "
            "optimizer into them, before prepare()."
        )
    if state["version"] != VERSION:
        raise UserError(
            f"session state has version {state['version']!r}; this halfstep "
            f"reads version {VERSION}."
        )
    for key in KEYS:
        _require(state, key)
    for key, inner in INNER.items():
        # A session without a schedule saves {}.
        for name in inner if state[key] or key != "schedule" else ():
            _require(state, key, name)
            if name in COUNTS:
                value = state[key][name]
                is_int, what = isinstance(value, int), f"{key}.{name} of the state"
                require_type(what, value, is_int, "an int")
    _check_weights(state["weights"], stored_tensors(model))
    _check_extra(state, model)
    _check_optimizer(state, model, masters)
    outside, own = state["outside"], _outside(model, masters)
    _check_weights(outside, own)
    saved = state["weights"] | outside
    for name, tensor in (stored_tensors(model) | own).items():
        is_param = name in own or isinstance(tensor, nn.Parameter)
        if is_param and is_low(tensor.dtype):
            convert_model.refuse_overflow([(name, saved[name])], tensor.dtype)


def _require(state: dict[str, Any], *path: str) -> None:
    """Raise if a state has no value at a path of nested keys."""
    inner: Any = state
    for key in path:
        if not isinstance(inner, dict) or key not in inner:
            present = [*inner] if isinstance(inner, dict) else inner
            message = f"session state has no {'.'.join(path)!r}; it holds {present}."
            raise UserError(message)
        inner = inner[key]


def _check_weights(saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for name in sorted(own.keys() | {n for n in saved if not _is_extra(n)}):
        mine, other = own.get(name), saved.get(name)
        if _kind(mine) != _kind(other):
            raise UserError(
                f"weight {name!r}: the state holds {_described(other)}, the session "
                f"{_described(mine)}; build model and optimizer as they were saved."
            )


def _kind(tensor: Tensor | None) -> tuple[object, ...] | None:
    """Return what a saved tensor must have in common with the session's."""
    if tensor is None:
        return None
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _described(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _check_extra(state: dict[str, Any], model: nn.Module) -> None:
    own, saved = _extra(model), {*state["extra"], *filter(_is_extra, state["weights"])}
    for name in sorted(own.keys() ^ saved):
        raise UserError(
            f"{name!r} is in {'the model' if name in own else 'the state'} alone; "
            "build the model that was saved."
        )


def _check_optimizer(
    state: dict[str, Any], model: nn.Module, masters: MasterWeights
) -> None:
    """Raise if parameter groups do not fit, or moments are missing or do not fit."""
    saved, own = state["optimizer"], masters.optimizer
    saved_groups, own_groups = saved["param_groups"], own.param_groups
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (saved_groups, own_groups)
    ]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the state's optimizer has groups of {sizes[0]} parameters, this one "
            f"of {sizes[1]}; group parameters as they were."
        )
    for name, other in zip_longest(_parameters(model, masters), state["parameters"]):
        if name != other:
            raise UserError(
                f"the state's optimizer holds {other!r} where this one holds {name!r}; "
                "give parameters in the order they had."
            )
    _check_optimizer_type(own, saved_groups)
    if state["moments"] != len(saved["state"]):
        raise UserError(
            f"the state was saved with moments of {state['moments']} parameters, and "
            f"holds those of {len(saved['state'])}. With torch.distributed.checkpoint,"
            " save and load halfstep.fsdp.Stateful(session)."
        )
    for number, param in _numbered(saved, own):
        for key, value in saved["state"].get(number, {}).items():
            fits = not torch.is_tensor(value) or value.shape == param.shape
            if key in MOMENTS and not fits:
                raise UserError(
                    f"optimizer state {key!r} of parameter {number} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(param.shape)}; give "
                    "parameters in the order they had."
                )


def _check_optimizer_type(
    optimizer: torch.optim.Optimizer, saved_groups: list[dict[str, Any]]
) -> None:
    """Raise if the hyper-parameters are of another optimizer."""
    for group in saved_groups:
        # Another torch version has more or fewer; only another optimizer has both.
        lacks = sorted(optimizer.defaults.keys() - group.keys())
        more = group.keys() - optimizer.defaults.keys()
        more -= {"params", "param_names", "initial_lr"}
        if lacks and more:
            raise UserError(
                f"the state is of another optimizer than "
                f"{type(optimizer).__name__}: its groups have {sorted(more)} and no "
                f"{lacks}. Build the optimizer that was saved."
            )


def _numbered(
    saved: dict[str, Any], optimizer: torch.optim.Optimizer
) -> list[tuple[int, Tensor]]:
    """Return (number in a saved state, the optimizer's parameter) pairs."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return list(zip(numbers, params, strict=True))


def load_optimizer_and_extra(
    state: dict[str, Any],
    model: nn.Module,
    masters: MasterWeights,
    choice: Choice,
    undo: ExitStack,
) -> None:
    """Load what the optimizer and modules may reject, of a state that passed `check`.

    `undo` gets what restores the current values.
    """
    masters.add_new_params()
    values = copy.deepcopy(state["weights"] | state["extra"])
    for name, before in copy.deepcopy(_extra(model)).items():
        owner = model.get_submodule(name.rpartition(".")[0])
        undo.callback(owner.set_extra_state, before)
        owner.set_extra_state(values[name])
    optimizer = masters.optimizer
    own = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    undo.callback(optimizer.__setstate__, own)
    saved = _shard_state(state["optimizer"], masters)
    optimizer.load_state_dict(saved)
    own_settings = choice.level.name, choice.format.name, _encoding_name(masters)
    form = state["masters"]["form"]
    same = (state.get("level"), state["dtype"], form) == own_settings
    _keep_dtypes(saved, optimizer, same=same)


@torch.no_grad()
def load_weights(
    state: dict[str, Any], model: nn.Module, masters: MasterWeights
) -> None:
    """Load the weights of a state that passed `check`; its tensors are copied."""
    saved = state["masters"]
    masters.set_rng(saved["seed"], saved["step"])
    low = saved["low"] if saved["form"] == masters.encoding.name else {}
    master_params = masters.by_weight_id()
    fp32_values = state["weights"] | state["outside"]
    tensors = stored_tensors(model) | _outside(model, masters)
    for name, tensor in tensors.items():
        fp32_value, slot = fp32_values[name], master_params.get(id(tensor))
        if slot is None:
            tensor.copy_(fsdp.shard_like(fp32_value, tensor))
            continue
        weight = low.get(name)
        if weight is not None:
            # It may be the model's own weight, to which `set_fp32_` writes first.
            weight = weight.clone()
        elif slot.residual is None:
            # Round to nearest: the random numbers belong to the next step.
            weight = fp32_value.to(slot.weight.dtype)
        masters.set_fp32_(slot.master, fsdp.shard_like(fp32_value, tensor), weight)
    masters.normalize_states()


def _encoding_name(masters: MasterWeights) -> str:
    return masters.encoding.name if masters.master_params else "none"


def _keep_dtypes(
    saved: dict[str, Any], optimizer: torch.optim.Optimizer, *, same: bool
) -> None:
    """Undo casts by `Optimizer.load_state_dict` that lose digits.

    Why: it casts all state but "step" to the dtype of the parameter, also scalars that
    the optimizer keeps in fp32 (`mu_product` of NAdam, `eta` of ASGD). `same`: saved
    with the same level, dtype and encoding, so that all dtypes are restored.
    """
    for number, param in _numbered(saved, optimizer):
        for key, value in saved["state"].get(number, {}).items():
            if not torch.is_tensor(value) or not value.is_floating_point():
                continue
            scalar = not value.dim() and (param.dim() > 0 or key in SCALARS)
            loaded = optimizer.state[param][key]
            if (same or scalar) and loaded.dtype != value.dtype:
                optimizer.state[param][key] = value.to(loaded.device)


def _shard_state(saved: dict[str, Any], masters: MasterWeights) -> dict[str, Any]:
    """Return an optimizer's state with moments sharded, or not, as its parameters."""
    param_of = dict(_numbered(saved, masters.optimizer))
    state = {
        number: {
            key: _shard_value(value, param_of.get(number))
            for key, value in values.items()
        }
        for number, values in saved["state"].items()
    }
    return saved | {"state": state}


def _shard_value(value: object, param: Tensor | None) -> object:
    if param is None or not torch.is_tensor(value) or value.shape != param.shape:
        return value
    return fsdp.shard_like(value, param) if value.dim() else value

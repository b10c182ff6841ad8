"""Updates weights and optimizer state in one pass over memory, by a kernel.

SGD, Adam and AdamW as plain numbers, the tensors of an update, their checks, and
`FusedStep`, which gives them to a kernel: `cpu_kernels` or `triton_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._torch import optimizer_hooks
from halfstep.errors import UserError
from halfstep.masters.encoding import (
    BF16_STATE_ENCODINGS,
    PLAIN,
    RESIDUAL_DTYPES,
    WEIGHT_DTYPES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

    from halfstep.masters.encoding import MasterEncoding, MasterParam, RoundingRng

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that kernels can read."""
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose arithmetic kernels know."""

_dtype, _is_cpu, _layout = map(attrgetter, ("dtype", "is_cpu", "layout"))
_step, _weight, _gradient = map(attrgetter, ("step", "weight", "gradient"))


@dataclass(frozen=True, slots=True)
class Sgd:
    """Hyperparameters of torch.optim.SGD."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of its state tensors in `optimizer.state`."""
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True, slots=True)
class Adam:
    """Hyperparameters of torch.optim.Adam and AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """AdamW: weight decay scales the weight and does not enter the moments."""
    amsgrad: bool
    maximize: bool

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of its state tensors in `optimizer.state`."""
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return keys if self.amsgrad else keys[:2]


Rule = Sgd | Adam


@dataclass(slots=True)
class ParamUpdate:
    """One parameter to update. All tensors are contiguous and have the same shape."""

    weight: Tensor
    """The model's weight: bf16, fp16 or fp32."""
    gradient: Tensor
    """bf16, fp16 or fp32, still multiplied by the loss scale."""
    residual: Tensor | None = None
    """What is stored beside the weight: see `MasterEncoding`."""
    states: tuple[Tensor, ...] = ()
    """SGD with momentum: (momentum_buffer,); Adam: (exp_avg, exp_avg_sq), and
    max_exp_avg_sq with amsgrad. fp32, or bf16 with "kahan" and "stochastic"."""
    step: Tensor | None = None
    """Adam: torch's step counter, fp32, shape (). Kernels on a device increment it; for
    others it is already incremented for this step."""
    is_first_step: bool = False
    """SGD: the momentum buffer is uninitialized and is set to the gradient."""
    param_index: int = 0
    """Index of the parameter, for random bits."""
    checked: tuple[object, ...] = ()
    """What `checked_tensors` compares: all but the gradient, when it was checked."""


@dataclass(frozen=True, slots=True)
class UpdateTensors:
    """What kernels read of some updates, in columns with one entry per update."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    numels: list[int]
    addresses: Sequence[list[int]]
    """Of weights, residuals, each of the rule's `state_keys`, and steps; a column is
    empty if the encoding has no residual, or the rule counts no steps."""


def checked_tensors(
    items: Sequence[ParamUpdate], rule: Rule, encoding: str, device: torch.device
) -> UpdateTensors:
    """Return the tensors of some updates after checking what kernels rely on.

    All but the gradients are checked again only where an address, or the weight's size
    or dtype, has changed.

    Raises:
        UserError: If one is missing, has gaps, or has another size, dtype or device.
    """
    weights = [*map(_weight, items)]
    gradients = readable_gradients([*map(_gradient, items)], device)
    numels = [*map(Tensor.numel, weights)]
    if [*map(Tensor.numel, gradients)] != numels:
        raise UserError("A gradient has another size than its weight: give it its own.")
    residuals, steps = [], []
    if encoding in RESIDUAL_DTYPES:
        residuals = [i.residual for i in items if i.residual is not None]
    if isinstance(rule, Adam):
        steps = [item.step for item in items if item.step is not None]
    states = [*zip(*[item.states for item in items], strict=False)]
    columns = [weights, residuals, *states[: len(rule.state_keys)], steps]
    addresses = [[*map(Tensor.data_ptr, column)] for column in columns]
    named = [encoding] * len(items), numels, map(_dtype, weights)
    rows = [*zip_longest(*named, *addresses)]
    if rows != [item.checked for item in items]:
        _check_columns(items, rule, encoding, device)
        for item, row in zip(items, rows, strict=True):
            item.checked = row
    return UpdateTensors(weights, gradients, numels, addresses)


def _check_columns(
    items: Sequence[ParamUpdate], rule: Rule, encoding: str, device: torch.device
) -> None:
    """Check all but the gradients, which alone are new in each step."""
    fp32 = (torch.float32,)
    moment = (torch.bfloat16,) if encoding in BF16_STATE_ENCODINGS else fp32
    keys = rule.state_keys
    for index, item in enumerate(items):
        numel = item.weight.numel()
        needed: list[tuple[str, Tensor | None, tuple[torch.dtype, ...], int]]
        needed = [("weight", item.weight, WEIGHT_DTYPES[encoding], numel)]
        if encoding in RESIDUAL_DTYPES:
            residual = (RESIDUAL_DTYPES[encoding],)
            needed.append(("residual", item.residual, residual, numel))
        states = zip_longest(keys, item.states[: len(keys)])
        needed += [(f"state {key}", state, moment, numel) for key, state in states]
        if isinstance(rule, Adam):
            needed.append(("step", item.step, fp32, 1))
        for what, tensor, dtypes, size in needed:
            if (
                tensor is None
                or tensor.device != device
                or tensor.dtype not in dtypes
                or tensor.numel() != size
                or not _are_plain([tensor])
            ):
                actual = "missing" if tensor is None else _description(tensor)
                raise UserError(
                    f"{what} of parameter {index} is {actual}; a kernel reads {size} "
                    f"numbers of {' or '.join(map(str, dtypes))} on {device}, without "
                    "gaps or lazy signs. Load or make the state again."
                )


def _description(tensor: Tensor) -> str:
    return (
        f"{tensor.numel()} numbers of {tensor.dtype} on {tensor.device} with strides "
        f"{tensor.stride()}"
    )


def readable_gradients(
    gradients: Sequence[Tensor], device: torch.device
) -> Sequence[Tensor]:
    """Return gradients made contiguous, without lazy negation, and checked.

    Raises:
        UserError: If one has another dtype or device.
    """
    if not _are_plain(gradients):
        gradients = [gradient.resolve_neg().contiguous() for gradient in gradients]
    # Reading `is_cpu` takes a third of the time of `device`.
    on_device = all(map(_is_cpu, gradients))
    if device.type != "cpu":
        on_device = all(gradient.device == device for gradient in gradients)
    if not (on_device and set(map(_dtype, gradients)).issubset(FLOATS)):
        wrong = (g.device != device or g.dtype not in FLOATS for g in gradients)
        index = [*wrong].index(True)
        raise UserError(
            f"gradient {index} is {_description(gradients[index])}; kernels take "
            f"{' or '.join(map(str, FLOATS))} on {device}."
        )
    return gradients


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether memory holds the values as they are, in order."""
    return all(map(Tensor.is_contiguous, tensors)) and not any(
        map(Tensor.is_neg, tensors)
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """The functions of `cpu_kernels` or `triton_kernels`."""

    description: str
    """One line for the user."""
    check_finite: Callable[..., tuple[Tensor, Tensor | None]]
    """(gradients, norm=) -> found_inf, fp32, shape (); and with `norm` the sum of
    squares, fp64, shape (), always added in the same order."""
    update: Callable[..., None]
    """(items, rule, encoding, inverse=, clock=) updates each `ParamUpdate` in place.
    `encoding` is a name; `inverse`, fp32, shape (), multiplies gradients; `clock` is
    the seed and step of the random numbers. It raises before it changes anything. Those
    on the host take step `counters`, which they increment first."""
    on_device: bool
    """Whether `update` takes `found_inf`, changes nothing where it is 1, and else also
    increments the step counters."""


def why_not_fused(optimizer: Optimizer) -> str:
    """Return why the optimizer's own `step` must be called; "" if a kernel may."""
    if optimizer_hooks.has_foreign_hooks(optimizer):
        return "it has step hooks"
    if "step" in vars(optimizer) and not optimizer_hooks.is_wrapped_by_lr_scheduler(
        optimizer
    ):
        return "its step was replaced"
    for group in optimizer.param_groups if type(optimizer) in OPTIMIZERS else ():
        if rule_of(optimizer, group) is None:
            return "differentiable=True, or a learning rate on a device"
    return ""


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """Return the update rule of a parameter group; None if it is not supported."""
    lr = group["lr"]
    if type(lr) is not float:
        lr = as_number(lr)
    if lr is None or group.get("differentiable"):
        return None
    if isinstance(optimizer, torch.optim.SGD):
        return Sgd(lr, *_of_sgd(group))
    beta1, beta2 = group["betas"]
    if not (type(beta1) is type(beta2) is float):
        beta1, beta2 = as_number(beta1), as_number(beta2)
    if beta1 is None or beta2 is None:
        return None
    plain_adamw = isinstance(optimizer, torch.optim.AdamW)
    decoupled = group.get("decoupled_weight_decay", plain_adamw)
    eps, decay, amsgrad, maximize = _of_adam(group)
    return Adam(lr, beta1, beta2, eps, decay, decoupled, amsgrad, maximize)


_of_sgd = itemgetter("momentum", "dampening", "nesterov", "weight_decay", "maximize")
_of_adam = itemgetter("eps", "weight_decay", "amsgrad", "maximize")


def as_number(value: Any) -> float | None:  # noqa: ANN401
    """Return a hyperparameter as a float; None if it is a tensor on a device."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if getattr(value, "is_cpu", False) else None


@dataclass(slots=True)
class FusedStep:
    """Updates an optimizer's parameters with a kernel, keeping torch's state keys.

    `master_params` and `param_index` are the live dicts of `MasterWeights`.
    """

    kernel: Kernel
    optimizer: Optimizer
    encoding: MasterEncoding
    master_params: dict[Tensor, MasterParam]
    param_index: dict[Tensor, int]
    items: dict[Tensor, ParamUpdate] = field(default_factory=dict)
    """Parameter -> its last update, whose tensors are reused."""

    def update(
        self,
        group: dict[str, Any],
        params: Iterable[Tensor],
        *,
        inverse: Tensor,
        rng: RoundingRng,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the parameters of a group that have a gradient.

        Args:
            group: Parameter group of the optimizer, with the hyperparameters.
            params: Those of the group to update.
            inverse: Factor on the gradients: 1 / loss scale. fp32, shape ().
            rng: For stochastic rounding.
            found_inf: 1.0 if nothing must change, shape (); for kernels on a device.
        """
        rule = rule_of(self.optimizer, group)
        assert rule is not None, "_choose_kernel() has rejected it"  # noqa: S101
        updates = self._updates(rule, params)
        on_device = self.kernel.on_device
        more: dict[str, Any] = {"found_inf": found_inf} if on_device else {}
        clock = rng.seed, rng.step
        for name, items in updates.items():
            if not items:
                continue
            if not on_device:
                is_adam = isinstance(rule, Adam)
                more["counters"] = [*map(_step, items)] if is_adam else ()
            self.kernel.update(items, rule, name, inverse=inverse, clock=clock, **more)
            for item in items:
                item.is_first_step = False
                item.gradient = item.weight  # do not keep the gradient alive
            torch.autograd.graph.increment_version([*map(_weight, items)])

    def _updates(
        self, rule: Rule, params: Iterable[Tensor]
    ) -> dict[str, list[ParamUpdate]]:
        """Return encoding -> the kernel's arguments for parameters with a gradient."""
        updates: dict[str, list[ParamUpdate]] = {self.encoding.name: [], PLAIN: []}
        lists = updates[self.encoding.name], updates[PLAIN]
        keys, states = rule.state_keys, self.optimizer.state
        for param in params:
            master_param = self.master_params.get(param)
            weight, residual = param, None
            if master_param is not None:
                weight, residual = master_param.weight, master_param.residual
            gradient = weight.grad
            if gradient is None:
                gradient = param.grad
            if gradient is None:
                continue
            state = states.setdefault(param, {}) if keys else {}
            item = self.items.get(param)
            if (
                item is None  # or it refers to other tensors than the current ones
                or item.weight is not weight
                or item.residual is not residual
                or not weight.is_contiguous()
                or len(keys) != len(item.states)
                or not all(map(is_, map(state.get, keys), item.states))
                or state.get("step") is not item.step
            ):
                item = self._make_item(rule, param, master_param, state)
            if not (weight.is_contiguous() and gradient.is_contiguous()):
                if gradient.stride() != weight.stride():
                    like = torch.empty_like(weight, dtype=gradient.dtype)
                    gradient = like.copy_(gradient)
                gradient = _flat(gradient, weight)
            item.gradient = gradient
            lists[master_param is None].append(item)
        return updates

    def _make_item(
        self,
        rule: Rule,
        param: Tensor,
        master_param: MasterParam | None,
        state: dict[str, Any],
    ) -> ParamUpdate:
        """Return the kernel's arguments for a parameter, and store them."""
        weight, residual, dtype = param, None, torch.float32
        if master_param is not None:
            dtype = self.encoding.state_dtype
            master_param.match_layout()
            weight, residual = master_param.weight, master_param.residual
        # Kernels on a device count steps there, like torch's fused optimizers.
        counter = weight.device if self.kernel.on_device else torch.device("cpu")
        first = _make_state(rule, state, weight, dtype, counter)
        flat = _flat(weight, weight)
        item = self.items[param] = ParamUpdate(
            flat,
            flat,
            None if residual is None else _flat(residual, weight),
            tuple(_flat(state[key], weight) for key in rule.state_keys),
            state.get("step"),
            first,
            self.param_index[param],
        )
        return item


def _make_state(
    rule: Rule,
    state: dict[str, Any],
    weight: Tensor,
    dtype: torch.dtype,
    counter: torch.device,
) -> bool:
    """Create an optimizer's state, or convert its dtypes; return whether it is new."""
    keys = rule.state_keys
    first = not state or (bool(keys) and state.get(keys[0]) is None)
    if first and isinstance(rule, Adam):
        state["step"] = torch.zeros((), dtype=torch.float32, device=counter)
    elif "step" in state:
        # Users set plain numbers, and older versions of torch stored integers.
        state["step"] = torch.as_tensor(
            state["step"], dtype=torch.float32, device=counter
        )
    for key in keys:
        moment = state.get(key)
        if moment is None:  # amsgrad may have been enabled later
            state[key] = torch.zeros_like(weight, dtype=dtype)
        elif (moment.dtype, moment.device, moment.stride()) != (
            dtype,
            weight.device,
            weight.stride(),
        ):
            state[key] = torch.empty_like(weight, dtype=dtype).copy_(moment)
    return first


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor as 1-D in memory order, unless `like` is contiguous."""
    if like.is_contiguous():
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def can_read(gradients: Sequence[Tensor]) -> bool:
    """Return whether kernels can read these gradients: dense, plain, 16 or 32 bits."""
    return (
        {*map(type, gradients)} <= {Tensor, torch.nn.Parameter}
        and {*map(_layout, gradients)} <= {torch.strided}
        and {*map(_dtype, gradients)} <= {*FLOATS}
        and not any(map(Tensor.is_neg, gradients))
    )

"""Unscales 16-bit gradients and updates weights and state in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch import optimizer_hooks
from halfstep.masters import cpu_kernels, eager_kernels, triton_kernels
from halfstep.masters.encoding import PLAIN
from halfstep.masters.update_rules import FLOATS, Adam, ParamUpdate, Rule, Sgd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.masters.encoding import MasterEncoding, MasterParam, RoundingRng

_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The functions of one of `cpu_kernels`, `eager_kernels` and `triton_kernels`."""

    description: str
    """One line for the user."""
    check_finite: Callable[..., tuple[Tensor, Tensor | None]]
    """(gradients, norm=) -> found_inf, fp32, shape (); and with `norm` the sum of
    squares, fp64, shape (), always added in the same order."""
    update: Callable[..., None]
    """(items, rule, encoding, inverse=, clock=) updates each `ParamUpdate` in place.
    `encoding` is a name; `inverse`, fp32, shape (), multiplies gradients; `clock` is
    the seed and step of the random numbers."""
    on_device: bool
    """Whether `update` takes `found_inf` and changes nothing where it is 1."""


def choose_kernel(
    optimizer: Optimizer, params: Iterable[Tensor]
) -> tuple[Kernel | None, str]:
    """Return the kernel for an optimizer, or None and the reason.

    `params` are the parameters of the model, not their master weights.
    """
    model_params = list(params)
    reason = _unsupported(optimizer, model_params)
    if reason:
        return None, reason
    device = model_params[0].device
    module: Any = triton_kernels
    if device.type == "cpu":
        module = cpu_kernels if cpu_kernels.available() else eager_kernels
    elif not triton_kernels.available(device):
        return None, f"no kernel for {device}"
    elif any(group.get("dampening") for group in optimizer.param_groups):
        # Whether a step filled the momentum buffer is known only on the device.
        return None, "dampening, and steps that are skipped on the device"
    on_device = module is triton_kernels
    kernel = Kernel(module.describe(), module.check_finite, module.update, on_device)
    return kernel, kernel.description


def _unsupported(optimizer: Optimizer, model_params: list[Tensor]) -> str:
    """Return why no kernel can update these parameters; "" if one can."""
    devices = sorted({str(param.device) for param in model_params})
    reason = ""
    if type(optimizer) not in _OPTIMIZERS:
        reason = "only the arithmetic of SGD, Adam and AdamW is built in"
    elif not model_params:
        reason = "it has no parameters"
    elif len(devices) > 1:
        reason = f"its parameters are on several devices: {', '.join(devices)}"
    elif any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in model_params):
        reason = "parameters are of a tensor subclass"
    elif not {param.dtype for param in model_params} <= {*FLOATS}:
        reason = "parameters are not all bf16, fp16 or fp32"
    elif not all(map(_is_dense, model_params)):
        reason = "a parameter has gaps in memory"
    return reason


def why_not_fused(optimizer: Optimizer) -> str:
    """Return why the optimizer's own `step` must be called; "" if a kernel may."""
    if optimizer_hooks.has_foreign_hooks(optimizer):
        return "it has step hooks"
    if "step" in vars(optimizer) and not optimizer_hooks.is_wrapped_by_lr_scheduler(
        optimizer
    ):
        return "its step was replaced"
    for group in optimizer.param_groups if type(optimizer) in _OPTIMIZERS else ():
        if rule_of(optimizer, group) is None:
            return "differentiable=True, or a learning rate on a device"
    return ""


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps in memory, whatever its dimension order."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """Return the update rule of a parameter group; None if it is not supported."""
    lr = group["lr"]
    if type(lr) is not float:
        lr = as_number(lr)
    if lr is None or group.get("differentiable"):
        return None
    if isinstance(optimizer, torch.optim.SGD):
        return Sgd(
            lr,
            group["momentum"],
            group["dampening"],
            group["nesterov"],
            group["weight_decay"],
            group["maximize"],
        )
    beta1, beta2 = group["betas"]
    if not (type(beta1) is type(beta2) is float):
        beta1, beta2 = as_number(beta1), as_number(beta2)
    if beta1 is None or beta2 is None:
        return None
    plain_adamw = isinstance(optimizer, torch.optim.AdamW)
    return Adam(
        lr,
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        group.get("decoupled_weight_decay", plain_adamw),
        group["amsgrad"],
        group["maximize"],
    )


def as_number(value: Any) -> float | None:  # noqa: ANN401
    """Return a hyperparameter as a float; None if it is a tensor on a device."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if getattr(value, "is_cpu", False) else None


class FusedStep:
    """Updates an optimizer's parameters with a kernel, keeping torch's state keys.

    `master_params` and `param_index` are the live dicts of `MasterWeights`.
    """

    def __init__(
        self,
        kernel: Kernel,
        optimizer: Optimizer,
        encoding: MasterEncoding,
        master_params: dict[Tensor, MasterParam],
        param_index: dict[Tensor, int],
    ) -> None:
        self.kernel = kernel
        self._optimizer = optimizer
        self._encoding = encoding
        self._master_params = master_params
        self._param_index = param_index
        self._items: dict[Tensor, ParamUpdate] = {}

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
        rule = rule_of(self._optimizer, group)
        assert rule is not None, "choose_kernel() has rejected it"  # noqa: S101
        updates: dict[str, list[ParamUpdate]] = {self._encoding.name: [], PLAIN: []}
        keys = rule.state_keys
        for param in params:
            item = self._update_for(rule, keys, param)
            if item is not None:
                name = self._encoding.name if param in self._master_params else PLAIN
                updates[name].append(item)
        more = {"found_inf": found_inf} if self.kernel.on_device else {}
        one = 1.0 if found_inf is None else 1.0 - found_inf
        for name, items in updates.items():
            if not items:
                continue
            steps = [item.step for item in items if item.step is not None]
            if steps:
                torch._foreach_add_(steps, one)
            clock = rng.seed, rng.step
            try:
                self.kernel.update(
                    items, rule, name, inverse=inverse, clock=clock, **more
                )
            except BaseException:
                if steps:  # kernels raise before they change anything
                    torch._foreach_add_(steps, -one)
                raise
            for item in items:
                item.is_first_step = False
                item.gradient = item.weight  # do not keep the gradient alive
            torch.autograd.graph.increment_version([item.weight for item in items])

    def _update_for(
        self, rule: Rule, keys: tuple[str, ...], param: Tensor
    ) -> ParamUpdate | None:
        """Return the kernel's arguments for a parameter; None without a gradient."""
        master_param = self._master_params.get(param)
        weight = param if master_param is None else master_param.weight
        gradient = weight.grad
        if gradient is None and master_param is not None:
            gradient = param.grad
        if gradient is None:
            return None
        state = self._optimizer.state.setdefault(param, {}) if keys else {}
        item = self._items.get(param)
        residual = None if master_param is None else master_param.residual
        if (
            item is None  # or it refers to other tensors than the current ones
            or item.weight is not weight
            or item.residual is not residual
            or not weight.is_contiguous()
            or len(keys) != len(item.states)
            or not all(map(is_, map(state.get, keys), item.states))
            or state.get("step") is not item.step
        ):
            dtype = torch.float32
            if master_param is not None:
                dtype = self._encoding.state_dtype
                master_param.match_layout()
                residual = master_param.residual
            # Kernels on a device count steps there, like torch's fused optimizers.
            counter = weight.device if self.kernel.on_device else torch.device("cpu")
            first = _make_state(rule, state, weight, dtype, counter)
            flat = _flat(weight, weight)
            item = self._items[param] = ParamUpdate(
                flat,
                flat,
                None if residual is None else _flat(residual, weight),
                tuple(_flat(state[key], weight) for key in keys),
                state.get("step"),
                first,
                self._param_index[param],
            )
        if not (weight.is_contiguous() and gradient.is_contiguous()):
            if gradient.stride() != weight.stride():
                like = torch.empty_like(weight, dtype=gradient.dtype)
                gradient = like.copy_(gradient)
            gradient = _flat(gradient, weight)
        item.gradient = gradient
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
        {*map(type, gradients)} <= {torch.Tensor, torch.nn.Parameter}
        and {gradient.layout for gradient in gradients} <= {torch.strided}
        and {gradient.dtype for gradient in gradients} <= {*FLOATS}
        and not any(map(torch.is_neg, gradients))
    )

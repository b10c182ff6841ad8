"""Updates straight from the model's 16-bit gradients, in one pass over memory.

In: an optimizer whose arithmetic is known, and its masters. Out: one kernel that
unscales, updates moments and masters, and publishes the weights; or the reason why
the optimizer has to do it itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch import optimizer_hooks
from halfstep.masters import cpu_kernels, eager_kernels, triton_kernels
from halfstep.masters.encoding import PLAIN
from halfstep.masters.update_rules import Adam, ParamUpdate, Rule, Sgd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.masters.encoding import MasterEncoding, MasterParam, RoundingRng

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A room that looks at lists of gradients, and updates lists of items."""

    description: str
    """What it is, for people."""
    check_finite: Callable[..., tuple[Tensor, Tensor | None]]
    """(gradients, norm=) -> 1.0 if any is not finite, in fp32; the sum of squares if
    asked for, in fp64; both of shape (), on the gradients' device."""
    update: Callable[..., None]
    """(items, rule, form, inverse=, clock=) updates in place."""
    on_device: bool
    """`update` also takes `found_inf`, and leaves everything alone where it is 1."""


def choose_kernel(
    optimizer: Optimizer, params: Iterable[Tensor]
) -> tuple[Kernel | None, str]:
    """Return the kernel for an optimizer, or None and the reason in words.

    Args:
        optimizer: Any.
        params: Those of the model, behind those of the optimizer.
    """
    model_params = list(params)
    devices = {str(param.device) for param in model_params}
    reason = ""
    if type(optimizer) not in _OPTIMIZERS:
        reason = "only the arithmetic of SGD, Adam and AdamW is built in"
    elif not model_params:
        reason = "it has no parameters"
    elif len(devices) > 1:
        reason = f"its parameters are on several devices: {', '.join(sorted(devices))}"
    elif any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in model_params):
        reason = "parameters are of a tensor class of their own"
    elif not {param.dtype for param in model_params} <= _FLOATS:
        reason = "parameters are not all bf16, fp16 or fp32"
    elif not all(_is_dense(param) for param in model_params):
        reason = "a parameter's numbers do not lie side by side in memory"
    if reason:
        return None, reason
    kernel = _kernel_for(model_params[0].device)
    dampened = (group.get("dampening") for group in optimizer.param_groups)
    if kernel is not None and kernel.on_device and any(dampened):
        # Whether a step filled the momentum is known on the device alone.
        return None, "dampening, and steps that are skipped on the device"
    return (
        kernel,
        kernel.description if kernel else f"no kernel for {model_params[0].device}",
    )


def _kernel_for(device: torch.device) -> Kernel | None:
    """Return the best kernel for a device."""
    if device.type == "cpu":
        kernels = cpu_kernels if cpu_kernels.available() else eager_kernels
        return Kernel(
            kernels.describe(), kernels.check_finite, kernels.update, on_device=False
        )
    if triton_kernels.available(device):
        kernels = triton_kernels
        return Kernel(
            kernels.describe(), kernels.check_finite, kernels.update, on_device=True
        )
    return None


def why_not_fused(optimizer: Optimizer) -> str:
    """Say why an optimizer must take this step itself; "" if it need not."""
    if optimizer_hooks.has_foreign_hooks(optimizer):
        return "it has step hooks"
    if "step" in vars(optimizer) and not optimizer_hooks.is_wrapped_by_lr_scheduler(
        optimizer
    ):
        return "its step was replaced"
    groups = optimizer.param_groups if type(optimizer) in _OPTIMIZERS else ()
    if any(rule_of(optimizer, group) is None for group in groups):
        return "differentiable=True, or a rate on a device"
    return ""


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the numbers of a tensor fill a stretch of memory, in any order."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """Return the arithmetic of a parameter group; None if it cannot be said."""
    lr = as_number(group["lr"])
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
    beta1, beta2 = (as_number(beta) for beta in group["betas"])
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
    """Return a hyper-parameter as a number; None if it is a tensor on a device."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if getattr(value, "is_cpu", False) else None


class FusedStep:
    """Updates the parameters of one optimizer with a kernel.

    Args:
        kernel: From `choose`.
        optimizer: Over masters and fp32 parameters; its state is kept as it keeps it.
        encoding: Of the masters.
        master_params: Of the masters, also those that come later.
        param_index: Parameter of the optimizer -> its number, likewise.
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
        """Update those parameters of a group that have a gradient.

        Args:
            group: Of the optimizer: with which numbers.
            params: Of that group.
            inverse: What gradients are multiplied by. fp32, shape ().
            rng: For random rounding.
            found_inf: 1.0 if nothing must change, shape (); for kernels on a device.
        """
        rule = rule_of(self._optimizer, group)
        assert rule is not None, "choose_kernel() has rejected it"  # noqa: S101
        low_updates: list[ParamUpdate] = []
        fp32_updates: list[ParamUpdate] = []
        for param in params:
            item = self._update_for(rule, param)
            if item is not None:
                (low_updates if param in self._master_params else fp32_updates).append(
                    item
                )
        for name, items in ((self._encoding.name, low_updates), (PLAIN, fp32_updates)):
            if not items:
                continue
            seed_and_step = (rng.seed, rng.step)
            more = {"found_inf": found_inf} if self.kernel.on_device else {}
            steps_taken = 1.0 if found_inf is None else 1.0 - found_inf
            steps = [item.step for item in items if item.step is not None]
            _add(steps, steps_taken)
            try:
                self.kernel.update(
                    items, rule, name, inverse=inverse, clock=seed_and_step, **more
                )
            except BaseException:
                _add(steps, -steps_taken)  # it refuses before it changes anything
                raise
            for item in items:
                item.is_first_step = False
                item.gradient = item.weight  # nothing must keep the gradient alive
            torch.autograd.graph.increment_version([item.weight for item in items])

    def _update_for(self, rule: Rule, param: Tensor) -> ParamUpdate | None:
        """Return what the kernel needs for a parameter; None without a gradient."""
        master_param = self._master_params.get(param)
        weight = param if master_param is None else master_param.weight
        gradient = weight.grad
        if gradient is None and master_param is not None:
            gradient = param.grad
        if gradient is None:
            return None
        keys = _state_keys(rule)
        state = self._optimizer.state.setdefault(param, {}) if keys else {}
        item = self._items.get(param)
        if item is None or not _is_current(item, weight, master_param, state, keys):
            dtype = (
                torch.float32 if master_param is None else self._encoding.state_dtype
            )
            on_device = self.kernel.on_device
            first = _make_state(rule, state, weight, dtype, on_device=on_device)
            item = self._items[param] = _new_item(
                rule, weight, master_param, state, first=first
            )
            item.param_index = self._param_index[param]
        is_contiguous = weight.is_contiguous() and gradient.is_contiguous()
        item.gradient = (
            gradient if is_contiguous else _grad_in_weight_order(gradient, weight)
        )
        return item


def _is_current(
    item: ParamUpdate,
    weight: Tensor,
    master_param: MasterParam | None,
    param_state: dict[str, Any],
    keys: tuple[str, ...],
) -> bool:
    """Say whether an item of an earlier step still speaks of the same memory.

    Why: to look at four tensors costs a third of what making an item does, and a model
    has a thousand.
    """
    return (
        item.weight is weight
        and item.residual is (None if master_param is None else master_param.residual)
        and weight.is_contiguous()
        and len(keys) == len(item.states)
        and all(param_state.get(key) is state for key, state in zip(keys, item.states))  # noqa: B905
        and param_state.get("step") is item.step
    )


def _make_state(
    rule: Rule,
    state: dict[str, Any],
    weight: Tensor,
    dtype: torch.dtype,
    *,
    on_device: bool,
) -> bool:
    """Make an optimizer's state on first use, or bring it into the form's dtype.

    Returns:
        Whether it is the first use.
    """
    keys = _state_keys(rule)
    first = not state or (bool(keys) and state.get(keys[0]) is None)
    # A kernel on a device counts there, as torch's fused optimizers do.
    home = weight.device if on_device else torch.device("cpu")
    if first and isinstance(rule, Adam):
        state["step"] = torch.zeros((), dtype=torch.float32, device=home)
    elif "step" in state:
        # Users set plain numbers, and torch itself has kept integers once.
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=home)
    for key in keys:
        moment = state.get(key)
        if moment is None:  # amsgrad may have been set later
            state[key] = torch.zeros_like(weight, dtype=dtype)
        elif (moment.dtype, moment.device, moment.stride()) != (
            dtype,
            weight.device,
            weight.stride(),
        ):
            state[key] = torch.empty_like(weight, dtype=dtype).copy_(moment)
    return first


def _new_item(
    rule: Rule,
    weight: Tensor,
    master_param: MasterParam | None,
    state: dict[str, Any],
    *,
    first: bool,
) -> ParamUpdate:
    """Return an item without its gradient."""
    if master_param is not None:
        master_param.match_layout()
    flat = _flat(weight, weight)
    residual = (
        None
        if master_param is None or master_param.residual is None
        else _flat(master_param.residual, weight)
    )
    states = tuple(_flat(state[key], weight) for key in _state_keys(rule))
    return ParamUpdate(flat, flat, residual, states, state.get("step"), first, 0)


def _grad_in_weight_order(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient's numbers in the order of the weight's memory."""
    if gradient.stride() != weight.stride():
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    return _flat(gradient, weight)


def _state_keys(rule: Rule) -> tuple[str, ...]:
    if isinstance(rule, Sgd):
        return ("momentum_buffer",) if rule.momentum else ()
    more = ("max_exp_avg_sq",) if rule.amsgrad else ()
    return ("exp_avg", "exp_avg_sq", *more)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor's memory in order, where its shape runs through it otherwise."""
    if like.is_contiguous():
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _add(steps: list[Tensor], number: Tensor | float) -> None:
    """Count steps of Adam, or take one back."""
    if steps:
        torch._foreach_add_(steps, number)


def can_read(gradients: Iterable[Tensor]) -> bool:
    """Say whether a kernel can read these gradients: dense, plain, 16 or 32 bits."""
    return all(
        type(gradient) in (torch.Tensor, torch.nn.Parameter)
        and gradient.layout == torch.strided
        and gradient.dtype in _FLOATS
        and not gradient.is_neg()
        for gradient in gradients
    )

"""Updates straight from the model's 16-bit gradients, in one pass over memory.

In: an optimizer whose arithmetic is known, and its masters. Out: one kernel that
unscales, updates moments and masters, and publishes the weights; or the reason why
the optimizer has to do it itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep import hooks
from halfstep.master import chunked, native, triton_kernels
from halfstep.master.arithmetic import Adam, Item, Rule, Sgd, numbers
from halfstep.master.piecewise import is_counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.master.form import Clock, Form, Slot

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_PLAIN = "plain"
"""The word for fp32 parameters of the same optimizer, which need no master."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A room that looks at lists of gradients, and updates lists of items."""

    words: str
    """What it is, for people."""
    look: Callable[..., tuple[Tensor, Tensor | None]]
    """(gradients, norm=) -> 1.0 if any is not finite, in fp32; the sum of squares if
    asked for, in fp64; both of shape (), on the gradients' device."""
    update: Callable[..., None]
    """(items, rule, form, inverse=, clock=) updates in place."""
    on_device: bool
    """`update` also takes `found_inf`, and leaves everything alone where it is 1."""


def choose(optimizer: Optimizer, params: Iterable[Tensor]) -> tuple[Kernel | None, str]:
    """Return the kernel for an optimizer, or None and the reason in words.

    Args:
        optimizer: Any.
        params: Those of the model, behind those of the optimizer.
    """
    held = list(params)
    devices = {str(param.device) for param in held}
    why = ""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        why = "only the arithmetic of SGD, Adam and AdamW is built in"
    elif not held:
        why = "it has no parameters"
    elif len(devices) > 1:
        why = f"its parameters are on several devices: {', '.join(sorted(devices))}"
    elif any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in held):
        why = "parameters are of a tensor class of their own"
    elif not {param.dtype for param in held} <= _FLOATS:
        why = "parameters are not all bf16, fp16 or fp32"
    elif not all(_is_dense(param) for param in held):
        why = "a parameter's numbers do not lie side by side in memory"
    if why:
        return None, why
    kernel = _on(held[0].device)
    return kernel, kernel.words if kernel else f"no kernel for {held[0].device}"


def _on(device: torch.device) -> Kernel | None:
    """Return the best kernel for a device."""
    if device.type == "cpu":
        room = native if native.available() else chunked
        return Kernel(room.describe(), room.look, room.update, on_device=False)
    if triton_kernels.available(device):
        room = triton_kernels
        return Kernel(room.describe(), room.look, room.update, on_device=True)
    return None


def hindrance(optimizer: Optimizer) -> str:
    """Say why an optimizer must take this step itself; "" if it need not."""
    if hooks.others(optimizer):
        return "it has step hooks"
    if "step" in vars(optimizer) and not is_counted(optimizer):
        return "its step was replaced"
    if any(rule_of(optimizer, group) is None for group in optimizer.param_groups):
        return "differentiable=True, or a rate on a device"
    return ""


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the numbers of a tensor fill a stretch of memory, in any order."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """Return the arithmetic of a parameter group; None if it cannot be said."""
    lr = numbers(group["lr"])
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
    beta1, beta2 = (numbers(beta) for beta in group["betas"])
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


def update(
    kernel: Kernel,
    optimizer: Optimizer,
    slots: dict[Tensor, Slot],
    order: dict[Tensor, int],
    form: Form,
    *,
    inverse: Tensor,
    clock: Clock,
    found_inf: Tensor | None = None,
    only: Tensor | None = None,
) -> None:
    """Update all parameters that have a gradient.

    Args:
        kernel: From `choose`.
        optimizer: Over masters and fp32 parameters; its state is kept as it keeps it.
        slots: Of the masters.
        order: Parameter of the optimizer -> its number.
        form: Of the masters.
        inverse: What gradients are multiplied by. fp32, shape ().
        clock: For random rounding.
        found_inf: 1.0 if nothing must change, shape (); for kernels on a device.
        only: The one parameter of the optimizer to update; default: all.
    """
    moved: list[Tensor] = []
    for group in optimizer.param_groups:
        if only is not None and not any(param is only for param in group["params"]):
            continue
        rule = rule_of(optimizer, group)
        assert rule is not None, "choose() has refused"  # noqa: S101
        kinds: dict[str, list[Item]] = {form.name: [], _PLAIN: []}
        for param in group["params"] if only is None else [only]:
            slot = slots.get(param)
            gradient = param.grad
            if slot is not None and slot.weight.grad is not None:
                gradient = slot.weight.grad
            if gradient is None:
                continue
            weight = param if slot is None else slot.weight
            states = torch.float32 if slot is None else form.states
            if slot is not None:
                slot.lie_alike()
            item = _item(
                optimizer,
                rule,
                param,
                weight,
                gradient,
                states,
                on_device=kernel.on_device,
            )
            item.extra = None if slot is None else _flat(slot.extra, weight)
            item.index = order[param]
            kinds[_PLAIN if slot is None else form.name].append(item)
            moved.append(weight)
        for name, items in kinds.items():
            if items:
                _count(items, found_inf)
                now = (clock.seed, clock.step)
                more = {"found_inf": found_inf} if kernel.on_device else {}
                kernel.update(items, rule, name, inverse=inverse, clock=now, **more)
    torch.autograd.graph.increment_version(moved)
    if only is None:
        hooks.tell(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001


def _item(
    optimizer: Optimizer,
    rule: Rule,
    param: Tensor,
    weight: Tensor,
    gradient: Tensor,
    dtype: torch.dtype,
    *,
    on_device: bool,
) -> Item:
    """Return what a kernel needs for one parameter; make its state on first use."""
    keys = _state_keys(rule)
    held = optimizer.state[param] if keys else {}
    first = not held or (bool(keys) and held.get(keys[0]) is None)
    # A kernel on a device counts there, as torch's fused optimizers do.
    home = weight.device if on_device else torch.device("cpu")
    if first and keys:
        if isinstance(rule, Adam):
            held["step"] = torch.zeros((), dtype=torch.float32, device=home)
        for key in keys:
            held[key] = torch.zeros_like(weight, dtype=dtype)
    if "step" in held and held["step"].device != home:
        held["step"] = held["step"].to(home)
    for key in keys:
        if key not in held:
            held[key] = torch.zeros_like(weight, dtype=dtype)  # amsgrad set later
        elif held[key].dtype != dtype or held[key].stride() != weight.stride():
            # A state that was loaded, or comes from another form.
            held[key] = torch.empty_like(weight, dtype=dtype).copy_(held[key])
    if gradient.stride() != weight.stride():
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    states = tuple(_flat(held[key], weight) for key in keys)
    flat, slope = _flat(weight.detach(), weight), _flat(gradient, weight)
    return Item(flat, slope, None, states, held.get("step"), first, 0)  # type: ignore[arg-type]


def _state_keys(rule: Rule) -> tuple[str, ...]:
    if isinstance(rule, Sgd):
        return ("momentum_buffer",) if rule.momentum else ()
    more = ("max_exp_avg_sq",) if rule.amsgrad else ()
    return ("exp_avg", "exp_avg_sq", *more)


def _flat(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a tensor's memory in order, where its shape runs through it otherwise."""
    if tensor is None or like.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _count(items: list[Item], found_inf: Tensor | None) -> None:
    """Count a step of Adam for each item, unless it is skipped."""
    steps = [item.step for item in items if item.step is not None]
    if steps:
        taken = 1.0 if found_inf is None else 1.0 - found_inf
        torch._foreach_add_(steps, taken)


def usable(gradients: Iterable[Tensor]) -> bool:
    """Say whether a kernel can read these gradients: dense, plain, 16 or 32 bits."""
    return all(
        type(gradient) in (torch.Tensor, torch.nn.Parameter)
        and gradient.layout == torch.strided
        and gradient.dtype in _FLOATS
        for gradient in gradients
    )

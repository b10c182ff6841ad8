"""Update rules of SGD, Adam and AdamW as plain numbers, and the tensors of an update.

Every fused kernel, compiled or not, takes an `Sgd` or `Adam` and `ParamUpdate`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.errors import UserError
from halfstep.masters.encoding import (
    BF16_STATE_ENCODINGS,
    RESIDUAL_DTYPES,
    WEIGHT_DTYPES,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that kernels can read."""

_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


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
    """Adam: torch's step counter, fp32, shape (), already incremented for this step."""
    is_first_step: bool = False
    """SGD: the momentum buffer is uninitialized and is set to the gradient."""
    param_index: int = 0
    """Index of the parameter, for random bits."""


@dataclass(frozen=True, slots=True)
class UpdateTensors:
    """The tensors of some updates in columns, one entry per update."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    residuals: Sequence[Tensor]
    """Empty if the encoding has no residual."""
    states: Sequence[Sequence[Tensor]]
    """One column for each of the rule's `state_keys`."""
    steps: Sequence[Tensor]
    """Empty for SGD."""
    numels: list[int]


def checked_tensors(
    items: Sequence[ParamUpdate], rule: Rule, encoding: str, device: torch.device
) -> UpdateTensors:
    """Return the tensors of some updates after checking what kernels rely on.

    Raises:
        UserError: If one is missing, has gaps, or has another size, dtype or device.
    """
    weights = [item.weight for item in items]
    check_tensors(weights, "weight", WEIGHT_DTYPES[encoding], device)
    gradients = readable_gradients([item.gradient for item in items], device)
    numels = [*map(Tensor.numel, weights)]
    if [*map(Tensor.numel, gradients)] != numels:
        message = "A gradient has another size than its weight: give it its own."
        raise UserError(message)
    moment = torch.bfloat16 if encoding in BF16_STATE_ENCODINGS else torch.float32
    column = [item.residual for item in items]
    columns = {"residual": (column, RESIDUAL_DTYPES.get(encoding))}
    states = zip_longest(*[item.states for item in items])
    for number in range(len(rule.state_keys)):
        columns[f"state {number}"] = [*next(states, ())], moment
    column = [item.step for item in items]
    columns["step"] = column, torch.float32 if isinstance(rule, Adam) else None
    complete = []
    for what, (tensors, dtype) in columns.items():
        present = [] if dtype is None else [t for t in tensors if t is not None]
        complete.append(present)
        if dtype is None:
            continue
        if len(present) != len(items):
            message = (
                f"{what}: {len(present)} of {len(items)} parameters have one; make it."
            )
            raise UserError(message)
        check_tensors(present, f"{what} of parameter", (dtype,), device)
        actual = [*map(Tensor.numel, present)]
        sizes = [1] * len(items) if what == "step" else numels
        if actual != sizes:
            index = next(i for i, size in enumerate(actual) if size != sizes[i])
            message = (
                f"{what} of parameter {index} has {actual[index]} numbers, not "
                f"{sizes[index]}. Load or make the state again."
            )
            raise UserError(message)
    residuals, *moments, steps = complete
    return UpdateTensors(weights, gradients, residuals, moments, steps, numels)


def readable_gradients(
    gradients: Sequence[Tensor], device: torch.device
) -> Sequence[Tensor]:
    """Return gradients made contiguous, without lazy negation, and checked.

    Raises:
        UserError: If one has another dtype or device.
    """
    is_plain = all(map(Tensor.is_contiguous, gradients))
    if not is_plain or any(map(Tensor.is_neg, gradients)):
        gradients = [gradient.resolve_neg().contiguous() for gradient in gradients]
    check_tensors(gradients, "gradient", FLOATS, device)
    return gradients


def check_tensors(
    tensors: Sequence[Tensor],
    what: str,
    allowed: Collection[torch.dtype],
    device: torch.device,
) -> None:
    """Reject tensors whose memory a kernel would misread.

    Raises:
        UserError: If one has another dtype or device, gaps, or lazy negation.
    """
    # Reading `is_cpu` takes a third of the time of `device`.
    on_device = all(map(_is_cpu, tensors))
    if device.type != "cpu":
        on_device = all(tensor.device == device for tensor in tensors)
    if not (on_device and set(map(_dtype, tensors)).issubset(allowed)):
        bad = (t.device != device or t.dtype not in allowed for t in tensors)
        index = next(i for i, wrong in enumerate(bad) if wrong)
        message = (
            f"{what} {index} is {tensors[index].dtype} on {tensors[index].device}; "
            f"kernels take {' or '.join(map(str, allowed))} on {device}."
        )
        raise UserError(message)
    is_plain = all(map(Tensor.is_contiguous, tensors))
    if not is_plain or any(map(Tensor.is_neg, tensors)):
        message = f"A {what} has gaps or lazy signs: call contiguous(), resolve_neg()."
        raise UserError(message)

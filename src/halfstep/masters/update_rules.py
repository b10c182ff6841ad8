"""The arithmetic of SGD, Adam and AdamW as plain numbers, and what it is applied to.

In: a parameter group of torch's optimizer. Out: a `Sgd` or `Adam`, or nothing where the
optimizer does something else. Every fused kernel, compiled or not, takes these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sgd:
    """torch.optim.SGD, with its names."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of its state tensors in `optimizer.state`."""
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True, slots=True)
class Adam:
    """torch.optim.Adam and AdamW, with their names."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """AdamW: decay shrinks the weight itself, and does not enter the moments."""
    amsgrad: bool
    maximize: bool

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of its state tensors in `optimizer.state`."""
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return keys if self.amsgrad else keys[:2]


Rule = Sgd | Adam


@dataclass(slots=True)
class ParamUpdate:
    """One parameter in an update. All tensors are contiguous and of one shape."""

    weight: Tensor
    """What the model holds: bf16, fp16, or fp32."""
    gradient: Tensor
    """bf16, fp16 or fp32, still multiplied by the loss scale."""
    residual: Tensor | None = None
    """What is kept beside the weight: see `MasterEncoding`."""
    states: tuple[Tensor, ...] = ()
    """SGD with momentum: (momentum_buffer,); Adam: (exp_avg, exp_avg_sq), and
    max_exp_avg_sq with amsgrad. fp32, or bf16 where the encoding keeps them so."""
    step: Tensor | None = None
    """Adam: torch's step counter, fp32, shape (), already counting this step."""
    is_first_step: bool = False
    """SGD: the momentum buffer is not filled yet; it takes the gradient as it is."""
    param_index: int = 0
    """Number of the parameter; random numbers depend on it."""

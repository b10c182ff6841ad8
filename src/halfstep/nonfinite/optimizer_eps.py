"""Finds optimizers whose eps is zero or too small in the format of their weights."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import optim
from torch.optim import Optimizer

from halfstep.nonfinite.domains import CHECKPOINT, dtype_name
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from torch import Tensor

_BY_ROOT = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop)
"""They divide by sqrt(v) + eps, which is eps alone where v is 0."""

CURE = "eps=6.1e-05, or master weights (level O2)"


@dataclass(frozen=True)
class EpsUnderflow:
    """A parameter group that is updated in 16 bits, with an eps too small for it."""

    optimizer: str
    group: int
    eps: float
    dtype: torch.dtype

    @property
    def is_zero(self) -> bool:
        """Whether eps is 0 in that format; else it is below its normal range."""
        return not torch.tensor(self.eps, dtype=self.dtype)

    def __str__(self) -> str:
        """Return what happens, without a full stop."""
        name = dtype_name(self.dtype)
        where = f"{self.optimizer} updates group {self.group} in {name}, where its "
        if self.is_zero:
            return f"{where}eps={self.eps:g} is 0, and 0 / 0 is NaN"
        return (
            f"{where}eps={self.eps:g} is all that it divides by if the square of a "
            "gradient is 0 there: such updates overflow"
        )


def eps_underflows(
    optimizer: Optimizer, dtype: torch.dtype | None = None
) -> list[EpsUnderflow]:
    """Return the groups of one of torch's optimizers whose eps is too small.

    Fused kernels divide in fp32, and the precision of other optimizers is unknown.
    `dtype` is the one in which weights will be stored; None: their present one.
    """
    classes = set(type(optimizer).__mro__) - {Optimizer}
    if not any(each.__module__.startswith("torch.optim") for each in classes):
        return []
    underflows = []
    for number, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        dtypes = {param.dtype if dtype is None else dtype for param in group["params"]}
        if not isinstance(eps, float) or not eps or group.get("fused"):
            continue
        for low in filter(is_low, dtypes):
            underflow = EpsUnderflow(type(optimizer).__name__, number, eps, low)
            # halfstep's threshold: training tolerates the large updates with eps=1e-05.
            is_small = 16 * eps < torch.finfo(low).smallest_normal
            if underflow.is_zero or (is_small and isinstance(optimizer, _BY_ROOT)):
                underflows.append(underflow)
    return underflows


def weight_advice(weight: Tensor, default: str = CHECKPOINT) -> str:
    """Return advice against inf or NaN in a weight; `default`: if it is not an eps.

    Searches all Python objects for the optimizers that update it.
    """
    if weight.dtype != torch.float16:
        return default
    objects = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
    optimizers = [each for each in objects if weight in getattr(each, "state", ())]
    for optimizer in optimizers:
        for underflow in eps_underflows(optimizer):
            params = optimizer.param_groups[underflow.group]["params"]
            if any(param is weight for param in params):
                return f"{underflow}: use {CURE}, from the last good checkpoint."
    if optimizers:
        return default
    return (
        f"{default} If Adam or its like updates it in float16 itself (level O3): an "
        f"eps of 1e-08 is 0 there, and 0 / 0 is NaN; use {CURE}."
    )

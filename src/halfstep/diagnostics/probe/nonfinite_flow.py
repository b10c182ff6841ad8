"""Modules that propagate inf and NaN from their input to their output.

In: a module. Out: whether a finite output implies that its input is finite, so
that a flag is known without reading the tensor.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as every

PROPAGATING_MODULES = frozenset(
    {
        nn.Linear,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.Dropout,
        nn.GELU,
        nn.SiLU,
    }
)
"""Each number of the input enters a number of the output as a term or a factor, and
each number of the output's gradient one of the input's: 0 * inf and inf - inf are NaN,
and NaN stays. So gelu(-inf) is -inf * 0. Not so most activations, which map -inf to a
finite number; convolutions, whose stride may pass over numbers; and pooling. Classes
themselves: a subclass may compute something else."""

_PROPAGATING_BY_NAME = frozenset({"transformers.activations.GELUActivation"})
"""Classes of others that only call one of these, by their full names."""


def _propagates(kind: type[nn.Module]) -> bool:
    return (
        kind in PROPAGATING_MODULES
        or f"{kind.__module__}.{kind.__qualname__}" in _PROPAGATING_BY_NAME
    )


def propagates_nonfinite(module: nn.Module) -> bool:
    """Say whether inf and NaN pass from a module's input to its output for certain.

    And from the gradient of its output to that of its input. Not where a hook could
    have replaced a value on the way: one is the probe's own. Nor with a weight of
    another layout or class, which may not multiply all that it meets.
    """
    if not _propagates(type(module)):
        return False
    weight = module._parameters.get("weight")  # noqa: SLF001
    return (
        (weight is None or type(weight) is nn.Parameter)
        and (weight is None or weight.layout is torch.strided)
        and not every._global_forward_hooks  # noqa: SLF001
        and len(module._forward_hooks) == 1  # noqa: SLF001
        and not module._forward_pre_hooks  # noqa: SLF001
        and not module._backward_hooks  # noqa: SLF001
        and not module._backward_pre_hooks  # noqa: SLF001
        and "forward" not in module.__dict__
    )

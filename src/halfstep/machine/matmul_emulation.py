"""Computes 16-bit matmuls in fp32 on CPUs without instructions for them.

Why: without such instructions torch multiplies 16-bit matrices element by element, up
to a hundred times as slowly as in fp32. The product of two 16-bit numbers of one format
is exact in fp32, and hardware with 16-bit matmuls accumulates in fp32: so the operands
are widened, multiplied, and the result is rounded once. The results are what hardware
gives, except for the order of summation; the speed is not meaningful.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._torch.dispatch_mode import DispatchMode
from halfstep.machine import hardware
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

_SLOW_RATIO = 0.5
"""Share of fp32's rate below which the CPU has no instructions for a format."""

_MATMULS = {
    torch.ops.aten.mm.default: (2, 1),
    torch.ops.aten.addmm.default: (3, 1),
    torch.ops.aten.bmm.default: (2, 1),
    torch.ops.aten.baddbmm.default: (3, 1),
    torch.ops.aten.convolution.default: (3, 1),
    torch.ops.aten.convolution_backward.default: (3, 3),
    # The second result, a logsumexp, is fp32 in 16-bit kernels too.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (3, 1),  # noqa: SLF001 -- torch's own name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (5, 3),  # noqa: SLF001
}
"""Operation -> number of its first arguments that share one dtype, and number of its
first results that have it too."""


def is_needed(dtype: str, device: str) -> bool:
    """Return whether matmuls in a format are too slow to use on a device."""
    if device != "cpu" or dtype == "fp32":
        return False
    rates = hardware.gemm_rates(device)
    return rates[dtype] < _SLOW_RATIO * rates["fp32"]


def emulate(dtype: str, device: str) -> AbstractContextManager[object]:
    """Return a context that computes 16-bit matmuls in fp32 if that is needed."""
    if is_needed(dtype, device):
        return Fp32Matmuls()  # type: ignore[no-untyped-call]
    return nullcontext()


def notes(dtypes: Iterable[str], device: str) -> list[str]:
    """Return what a report of trainings in these formats must say, a line each."""
    return [
        f"{dtype}: this CPU has no {dtype} matmuls, so they are computed in fp32 and "
        f"rounded: metrics and skipped steps are those of {dtype}, times are not"
        for dtype in sorted(set(dtypes))
        if is_needed(dtype, device)
    ]


class Fp32Matmuls(DispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that computes 16-bit matmuls in fp32 and rounds the results."""

    def run(
        self,
        func: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an operation, in fp32 if it is a 16-bit matmul."""
        num_operands, num_results = _MATMULS.get(func, (0, 0))
        # A convolution without a bias has None for it.
        dtypes = {x.dtype for x in args[:num_operands] if x is not None}
        # Operands of mixed dtypes must raise torch's error, as without this mode.
        if len(dtypes) != 1 or not is_low(dtype := dtypes.pop()):
            return func(*args, **kwargs)
        named = {key: _to_fp32(each) for key, each in kwargs.items()}
        result = func(*map(_to_fp32, args), **named)
        if isinstance(result, Tensor):
            return result.to(dtype)
        # Gradients of a convolution that are not needed are None.
        low = (x if x is None else x.to(dtype) for x in result[:num_results])
        return *low, *result[num_results:]


def _to_fp32(value: Any) -> Any:  # noqa: ANN401 -- of what torch hands over
    return value.float() if isinstance(value, Tensor) and is_low(value.dtype) else value

"""Computes fp16 matmuls in fp32 on CPUs without fp16 instructions.

Why: without such instructions torch multiplies fp16 matrices element by element, about
thirty times as slowly as fp32. The product of two fp16 numbers is exact in fp32, and
hardware with fp16 matmuls accumulates in fp32: so the operands are widened, multiplied,
and the result is rounded once. The results are what hardware gives, except for the
order of summation; the speed is not meaningful.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._torch.dispatch_mode import DispatchMode
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SLOW_RATIO = 0.5
"""Share of fp32's rate below which the CPU has no fp16 instructions."""

_MATMULS = {
    torch.ops.aten.mm.default: (2, 1),
    torch.ops.aten.addmm.default: (3, 1),
    torch.ops.aten.bmm.default: (2, 1),
    torch.ops.aten.baddbmm.default: (3, 1),
    torch.ops.aten.convolution.default: (3, 1),
    torch.ops.aten.convolution_backward.default: (3, 3),
    # The second result, a logsumexp, is fp32 in fp16 kernels too.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (3, 1),  # noqa: SLF001 -- torch's own name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (5, 3),  # noqa: SLF001
}
"""Operation -> number of its first arguments that share one dtype, and number of its
first results that have it too."""


def is_needed(device: str) -> bool:
    """Return whether fp16 matmuls on a device are too slow to use."""
    rates = hardware.gemm_rates(device)
    return device == "cpu" and rates["fp16"] < _SLOW_RATIO * rates["fp32"]


class Fp32Matmuls(DispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that computes fp16 matmuls in fp32 and rounds the results."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation, in fp32 if it is an fp16 matmul."""
        del types
        operands, num_results = _MATMULS.get(func, (0, 0))
        # Operands of mixed dtypes must raise torch's error, as without this mode.
        if operands and all(map(_is_fp16, args[:operands])):
            named = {key: _to_fp32(each) for key, each in (kwargs or {}).items()}
            result = func(*map(_to_fp32, args), **named)
            if isinstance(result, Tensor):
                return result.half()
            return *map(_to_fp16, result[:num_results]), *result[num_results:]
        return func(*args, **(kwargs or {}))


def _is_fp16(operand: Tensor | None) -> bool:
    """Return whether an operand is fp16; None (no bias) counts as fp16."""
    return operand is None or operand.dtype is torch.float16


def _to_fp32(value: Any) -> Any:  # noqa: ANN401 -- of what torch hands over
    is_fp16 = isinstance(value, Tensor) and value.dtype is torch.float16
    return value.float() if is_fp16 else value


def _to_fp16(value: Tensor | None) -> Tensor | None:
    """Round a result; gradients of a convolution that are not needed are None."""
    return None if value is None else value.half()

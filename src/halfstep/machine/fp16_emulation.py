"""fp16 products on a CPU that has none, in useful time.

In: a region of a program. Out: the same numbers, computed in fp32 and rounded.

Why: without instructions for fp16, torch multiplies fp16 matrices on a CPU one number
at a time, some thirty times as slowly as fp32 ones. A product of two fp16 numbers is
exact in fp32, and what has fp16 products adds them up in fp32: so the operands are
widened, multiplied, and the result is rounded once. What is learned is what hardware
would learn, but for the order of sums; how quickly says nothing.
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
"""Share of fp32's rate below which fp16 has no instructions of its own."""

_MATMULS = {
    torch.ops.aten.mm.default: (2, 1),
    torch.ops.aten.addmm.default: (3, 1),
    torch.ops.aten.bmm.default: (2, 1),
    torch.ops.aten.baddbmm.default: (3, 1),
    torch.ops.aten.convolution.default: (3, 1),
    torch.ops.aten.convolution_backward.default: (3, 3),
    # The second result is the logarithm of a sum, in fp32 as fp16 kernels have it.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (3, 1),  # noqa: SLF001 -- torch's own name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (5, 3),  # noqa: SLF001
}
"""Operation -> how many of its arguments are operands of one dtype, and how many of its
results, from the first, have it too."""


def is_needed(device: str) -> bool:
    """Say whether a device has no fp16 products worth waiting for."""
    rates = hardware.gemm_rates(device)
    return device == "cpu" and rates["fp16"] < _SLOW_RATIO * rates["fp32"]


class Fp32Matmuls(DispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of fp16 matrices in fp32, and rounds the results."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation."""
        del types
        operands, num_results = _MATMULS.get(func, (0, 0))
        # What mixes formats torch refuses, and must go on to.
        if operands and all(map(_is_fp16, args[:operands])):
            named = {key: _to_fp32(each) for key, each in (kwargs or {}).items()}
            result = func(*map(_to_fp32, args), **named)
            if isinstance(result, Tensor):
                return result.half()
            return *map(_to_fp16, result[:num_results]), *result[num_results:]
        return func(*args, **(kwargs or {}))


def _is_fp16(operand: Tensor | None) -> bool:
    """Say whether an operand is in fp16; a bias that is not there is no hindrance."""
    return operand is None or operand.dtype is torch.float16


def _to_fp32(value: Any) -> Any:  # noqa: ANN401 -- of what torch hands over
    is_fp16 = isinstance(value, Tensor) and value.dtype is torch.float16
    return value.float() if is_fp16 else value


def _to_fp16(value: Tensor | None) -> Tensor | None:
    """Round a result; of a convolution, gradients that nobody wants are None."""
    return None if value is None else value.half()

"""Implements the functions of apex's extension `amp_C` that programs call.

They use torch's foreach operations and do not synchronize with the device; the first
argument, `chunk_size`, is not used.
"""  # noqa: N999 -- apex's name

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from halfstep.compat.apex.state import AmpError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_scale"]


def multi_tensor_scale(
    _chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float,
) -> None:
    """Write inputs * scale, computed in fp32, into outputs; they may be the same.

    `noop_flag`, shape (1,), is set to 1 if an input is non-finite.
    """
    inputs, outputs = _lists("multi_tensor_scale", tensor_lists, 2)
    if not inputs:
        return
    _flag(noop_flag, inputs)
    scaled = torch._foreach_mul(_wide(inputs), scale)  # noqa: SLF001 -- torch's name
    torch._foreach_copy_(outputs, scaled)


def multi_tensor_axpby(
    _chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """Write a * x + b * y, computed in fp32, into outputs, which may be x or y.

    `noop_flag`, shape (1,), is set to 1 if a checked input is non-finite: x if
    `arg_to_check` is 0, y if it is 1, both if it is -1.
    """
    x, y, outputs = _lists("multi_tensor_axpby", tensor_lists, 3)
    checked = {-1: [*x, *y], 0: x, 1: y}
    if arg_to_check not in checked:
        raise AmpError(
            f"multi_tensor_axpby: arg_to_check={arg_to_check!r} must be 0 (the first "
            "list), 1 (the second) or -1 (both)."
        )
    if not x:
        return
    _flag(noop_flag, checked[arg_to_check])
    sums = torch._foreach_mul(_wide(x), a)  # noqa: SLF001
    torch._foreach_add_(sums, torch._foreach_mul(_wide(y), b))  # noqa: SLF001
    torch._foreach_copy_(outputs, sums)


def multi_tensor_l2norm(
    _chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of all values, shape (1,), and of each tensor or none, in fp32.

    `noop_flag`, shape (1,), is set to 1 if the norm is non-finite.
    """
    (tensors,) = _lists("multi_tensor_l2norm", tensor_lists, 1)
    if not tensors:
        zero = torch.zeros(1, device=noop_flag.device)
        return zero, zero[:0]
    double = any(tensor.dtype is torch.float64 for tensor in tensors)
    wide = torch.float64 if double else torch.float32
    each = torch.stack(list(torch._foreach_norm(tensors, 2, wide))).float()  # noqa: SLF001
    norm = torch.linalg.vector_norm(each).reshape(1)
    _flag(noop_flag, [norm])
    return norm, each if per_tensor else each[:0]


def _lists(
    name: str, tensor_lists: Sequence[Sequence[Tensor]], count: int
) -> list[list[Tensor]]:
    """Return `count` lists of equal length."""
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(tensor_lists) != count or len(set(lengths)) > 1:
        message = f"{name} takes {count} lists of one length, not of lengths {lengths}."
        raise AmpError(message)
    return [list(tensors) for tensors in tensor_lists]


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t if t.dtype is torch.float64 else t.float() for t in tensors]


def _flag(noop_flag: Tensor, tensors: list[Tensor]) -> None:
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    noop_flag.masked_fill_(~finite.to(noop_flag.device), 1)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"amp_C.{name} is not here; there are {', '.join(__all__)}. Optimizers: use "
        "torch's, or halfstep.compat.apex.optimizers."
    )

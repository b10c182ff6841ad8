"""Launches the Triton kernels of fused updates on CUDA devices.

One launch updates a whole group of tensors in one pass over memory, or changes nothing
if `found_inf` is set on the device, without host-device synchronization.
"""

from __future__ import annotations

import math
import struct
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError
from halfstep.masters import bf16_codecs
from halfstep.masters.fused_step import (
    Adam,
    ParamUpdate,
    Rule,
    Sgd,
    UpdateTensors,
    checked_tensors,
    readable_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

BLOCK = 1024
"""Elements per program; 4 warps then load bf16 in pieces of 16 bytes."""
CHECK_BLOCK = 4096
"""Elements per program of `check_finite`."""
_CORRECTION_BLOCK = 128
"""Tensors per program of `correct`, which computes bias corrections."""
_ALIGNED = 16
_MIN_CAPABILITY = (7, 5)
"""Lowest compute capability that Triton supports."""

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Kind = tuple[str, str, str, bool]
"""Dtypes of weight, gradient and state, and whether all addresses are aligned."""


def available(device: torch.device) -> bool:
    """Return whether the kernels can run on a device, without importing Triton."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if find_spec("triton") is None:
        return False
    return bool(torch.version.hip) or (
        torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
    )


def describe() -> str:
    """Return a one-line description."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return f"Triton {metadata.version(name)}, one launch for all tensors"
        except metadata.PackageNotFoundError:
            continue
    return "no Triton: it comes with CUDA builds of torch"


@torch.no_grad()
def update(
    items: Sequence[ParamUpdate],
    rule: Rule,
    encoding: str,
    *,
    inverse: Tensor,
    clock: tuple[int, int],
    found_inf: Tensor,
) -> None:
    """Update tensors unless `found_inf` is set: see `fused_step.Kernel`.

    `is_first_step` must stay set until a step was applied: skipped steps do not fill
    the momentum buffer.
    """
    device = inverse.device
    # Keep the tensors alive until the kernels are launched.
    tensors = checked_tensors(items, rule, encoding, device)
    groups: dict[Kind, list[list[int]]] = {}
    for index, item in enumerate(items):
        if tensors.numels[index]:
            kind, line = _param_line(item, index, tensors, encoding, clock)
            groups.setdefault(kind, []).append(line)
    adam = isinstance(rule, Adam)
    code = _code()
    with _on(device):
        for (weights, gradients, states, aligned), lines in groups.items():
            rows, blocks = len(lines), _count(lines, BLOCK)
            table = _upload([_rule_words(rule), *lines], device)
            corrections = inverse
            if adam:
                corrections = inverse.new_empty((rows, 2), dtype=torch.float32)
                code["correct"][(-(-rows // _CORRECTION_BLOCK),)](
                    table,
                    rows,
                    corrections,
                    block=_CORRECTION_BLOCK,
                    enable_fp_fusion=False,
                )
            code["update"][(blocks,)](
                table,
                rows,
                corrections,
                inverse,
                found_inf,
                rule="adam" if adam else "sgd",
                encoding=encoding,
                weights=weights,
                gradients=gradients,
                states=states,
                flags=_flags(rule),
                aligned=aligned,
                block=BLOCK,
                enable_fp_fusion=False,
            )


@torch.no_grad()
def check_finite(
    gradients: Sequence[Tensor], *, norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Check one or more gradients: see `fused_step.Kernel`."""
    if not gradients:
        raise UserError("gradients=[] has nothing to look at; give at least one.")
    device = gradients[0].device
    gradients = readable_gradients(gradients, device)
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            key = _DTYPE_NAMES[gradient.dtype], gradient.data_ptr() % _ALIGNED == 0
            groups.setdefault(key, []).append(gradient)
    code = _code()
    with _on(device):
        found_inf = torch.zeros((), device=device)
        sums: list[Tensor] = []
        for (kind, aligned), members in groups.items():
            lines = [[member.data_ptr(), member.numel(), 0] for member in members]
            blocks = _count(lines, CHECK_BLOCK)
            table = _upload([[0, 0, 0], *lines], device)
            own = found_inf.new_empty(blocks if norm else 1, dtype=torch.float64)
            code["check_finite"][(blocks,)](
                table,
                len(members),
                found_inf,
                own,
                gradients=kind,
                norm=norm,
                aligned=aligned,
                block=CHECK_BLOCK,
                enable_fp_fusion=False,
            )
            sums.append(own)
        if not norm:
            return found_inf, None
        total = torch.cat(sums) if sums else found_inf.new_zeros(1, dtype=torch.float64)
        return found_inf, total.sum()


@cache
def _code() -> dict[str, Any]:
    """Return the kernels; importing Triton is deferred to the first launch."""
    from halfstep.masters import triton_jit

    return triton_jit.load()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes `device` current: Triton launches kernels there."""
    if device.type != "cuda":
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            "halfstep's fused update cannot be captured in a CUDA graph: each step has "
            "its own table of numbers. Capture forward and backward alone."
        )
    return torch.cuda.device(device)


def _upload(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy a table to the device without synchronization."""
    pinned = device.type == "cuda"
    flat = list(chain.from_iterable(lines))
    table = torch.tensor(flat, dtype=torch.int64, pin_memory=pinned)
    return table.to(device, non_blocking=True)


def _count(lines: list[list[int]], block: int) -> int:
    """Write into each row the number of blocks before it; return the total."""
    before = 0
    for line in lines:
        line[2] = before
        before += -(-line[1] // block)
    return before


def _rule_words(rule: Rule) -> list[int]:
    """Return the header row of a table, doubles as 64-bit words."""
    if isinstance(rule, Sgd):
        first_words = (rule.lr, rule.weight_decay, rule.momentum, 1 - rule.dampening)
        numbers = (*first_words, 0.0, 0.0, 0.0, 0.0)
    else:
        shrink = 1 - rule.lr * rule.weight_decay
        numbers = (
            rule.lr,
            shrink if rule.decoupled else rule.weight_decay,
            rule.beta2,
            1 - rule.beta2,
            1 - (1 - rule.beta1) if _far(rule) else 1 - rule.beta1,
            rule.eps,
            _log(rule.beta1),
            _log(rule.beta2),
        )
    return [*struct.unpack("<8q", struct.pack("<8d", *numbers)), *(0,) * 6]


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _far(rule: Adam) -> bool:
    return rule.beta1 <= 0.5  # noqa: PLR2004 -- a half


def _flags(rule: Rule) -> int:
    """Return the compile-time flags of a rule, as bits defined in `triton_jit`."""
    flags = (rule.weight_decay != 0) | rule.maximize << 4
    if isinstance(rule, Sgd):
        return flags | rule.nesterov << 2
    return flags | rule.decoupled << 1 | rule.amsgrad << 3 | _far(rule) << 5


def _param_line(
    item: ParamUpdate,
    index: int,
    tensors: UpdateTensors,
    encoding: str,
    clock: tuple[int, int],
) -> tuple[Kind, list[int]]:
    """Return the kernel variant that an item needs, and its row of the table."""
    weight, gradient = tensors.weights[index], tensors.gradients[index]
    states = [column[index] for column in tensors.states]
    address = weight.data_ptr()
    residual = tensors.residuals[index].data_ptr() if tensors.residuals else 0
    state_addresses = [state.data_ptr() for state in states]
    addresses = [gradient.data_ptr(), address, residual, *state_addresses]
    aligned = not any(place % _ALIGNED for place in addresses)
    state_name = _DTYPE_NAMES[states[0].dtype] if states else "none"
    line = [
        *(addresses[0], weight.numel(), 0, address, residual),
        *state_addresses,
        *(0,) * (3 - len(states)),
        tensors.steps[index].data_ptr() if tensors.steps else 0,
        int(not item.is_first_step),
    ]
    if encoding == "stochastic" or state_name == "bf16":
        line += bf16_codecs.key(*clock, item.param_index, 0)
        line += bf16_codecs.key(*clock, item.param_index, 1)
    else:
        line += (0, 0, 0, 0)
    names = _DTYPE_NAMES[weight.dtype], _DTYPE_NAMES[gradient.dtype], state_name
    return (*names, aligned), line

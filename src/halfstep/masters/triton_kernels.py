"""Fused updates on CUDA devices: a whole group of tensors in one launch.

In: items, their rule and form. Out: gradients, state, fp32 value and weights updated in
one pass over memory, or left alone where the device says so; the host waits for
nothing.
"""

from __future__ import annotations

import math
import struct
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError
from halfstep.masters import bf16_codecs
from halfstep.masters.encoding import RESIDUAL_DTYPES, WEIGHT_DTYPES
from halfstep.masters.update_rules import Adam, ParamUpdate, Rule, Sgd

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

BLOCK = 1024
"""Numbers that one program updates; 4 warps read bf16 in pieces of 16 bytes."""
CHECK_BLOCK = 4096
"""Numbers whose squares one program adds."""
_CORRECTION_BLOCK = 128
"""Tensors whose bias corrections one program works out."""
_ALIGNED = 16
_MIN_CAPABILITY = (7, 5)
"""Compute capability from which Triton compiles."""

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Kind = tuple[str, str, str, bool]
"""Dtypes of weight, gradient and state, and whether all memory is aligned."""


def available(device: torch.device) -> bool:
    """Say whether the kernels can run on a device, without importing Triton."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if find_spec("triton") is None:
        return False
    return bool(torch.version.hip) or (
        torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
    )


def describe() -> str:
    """Return what the kernels are made with, for people."""
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
    """Update tensors, unless an overflow was found.

    Where it was, momentum that was never filled stays so: an item is `first` until a
    step was taken.

    Args:
        items: Of one group, on one device.
        rule: What the optimizer does.
        encoding: Of the weights: "fp32", "split", "kahan", "stochastic", "plain".
        inverse: What gradients are multiplied by; fp32, shape (), on the device.
        clock: Seed and step, for random numbers.
        found_inf: fp32, shape (), on the device; unless it is 0 nothing changes.

    Raises:
        UserError: If an item's tensors do not fit the form.
    """
    device = inverse.device
    # What is resolved here must live until the kernels are launched.
    items = [_resolved(item) for item in items]
    groups: dict[Kind, list[list[int]]] = {}
    for item in items:
        if item.weight.numel():
            kind, line = _param_line(item, rule, encoding, clock, device)
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
    """Read all gradients once.

    Args:
        gradients: bf16, fp16 or fp32, on one device; at least one.
        norm: Whether the sum of squares is wanted.

    Returns:
        1.0 if there is an infinity or NaN, else 0.0, in fp32; and the sum in fp64,
        the same to the bit each time.

    Raises:
        UserError: If there are no gradients, or one has another dtype.
    """
    if not gradients:
        message = "gradients=[] has nothing to look at; give at least one."
        raise UserError(message)
    device = gradients[0].device
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            flat = gradient.resolve_neg().contiguous()
            aligned = flat.data_ptr() % _ALIGNED == 0
            groups.setdefault((_dtype_name(flat, "gradient"), aligned), []).append(flat)
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
    """Return the kernels; Triton is imported here, where they are about to run."""
    from halfstep.masters import triton_jit

    return triton_jit.load()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Be on a device: Triton launches where the process stands, not where tensors are.

    Raises:
        UserError: If launches are being recorded. Each step has its own addresses,
            numbers and random bits; a recording would repeat those of one.
    """
    if device.type != "cuda":
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        message = (
            "halfstep's fused update cannot be captured in a CUDA graph: each step has "
            "its own table of numbers. Capture forward and backward alone."
        )
        raise UserError(message)
    return torch.cuda.device(device)


def _upload(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Send a table to the device, without waiting for it to arrive."""
    pinned = device.type == "cuda"
    flat = list(chain.from_iterable(lines))
    table = torch.tensor(flat, dtype=torch.int64, pin_memory=pinned)
    return table.to(device, non_blocking=True)


def _count(lines: list[list[int]], block: int) -> int:
    """Note in each line how many blocks there are before; return how many in all."""
    before = 0
    for line in lines:
        line[2] = before
        before += -(-line[1] // block)
    return before


def _rule_words(rule: Rule) -> list[int]:
    """Return the first line of a table: doubles by their bits."""
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
    """Return what is compiled into the kernel, as bits that `triton_ops` names."""
    flags = (rule.weight_decay != 0) | rule.maximize << 4
    if isinstance(rule, Sgd):
        return flags | rule.nesterov << 2
    return flags | rule.decoupled << 1 | rule.amsgrad << 3 | _far(rule) << 5


def _resolved(item: ParamUpdate) -> ParamUpdate:
    """Return an item whose gradient has its sign in memory; autograd may be lazy."""
    if not item.gradient.is_neg():
        return item
    return replace(item, gradient=item.gradient.resolve_neg())


def _param_line(
    item: ParamUpdate,
    rule: Rule,
    encoding: str,
    clock: tuple[int, int],
    device: torch.device,
) -> tuple[Kind, list[int]]:
    """Return what kernel an item needs, and its line, once it is known to fit."""
    weight, residual, gradient = item.weight, item.residual, item.gradient
    allowed, residual_dtype = WEIGHT_DTYPES[encoding], RESIDUAL_DTYPES.get(encoding)
    actual_dtype = None if residual is None else residual.dtype
    if weight.dtype not in allowed or actual_dtype is not residual_dtype:
        message = (
            f"Item {item.param_index} has a weight of {weight.dtype} and "
            f"{actual_dtype} "
            "beside it; "
            f"form={encoding!r} takes {' or '.join(map(str, allowed))}, "
            f"and {residual_dtype}."
        )
        raise UserError(message)
    step = item.step
    num_states = len(rule.state_keys)
    if len(item.states) != num_states or (isinstance(rule, Adam) and step is None):
        message = (
            f"Item {item.param_index} has {len(item.states)} state tensors and "
            f"{'no' if step is None else 'a'} step; {rule} needs {num_states}, "
            "Adam a step."
        )
        raise UserError(message)
    tensors = (
        gradient,
        weight,
        *item.states,
        *(() if residual is None else (residual,)),
    )
    numel = weight.numel()
    for tensor in tensors:
        is_plain = tensor.is_contiguous() and not tensor.is_neg()
        if tensor.numel() != numel or not is_plain:
            lazy = "lazy signs" if tensor.is_neg() else f"strides {tensor.stride()}"
            message = (
                f"Item {item.param_index} has a tensor of shape {tuple(tensor.shape)} "
                "and "
                f"{lazy}; it must be contiguous, of {numel} numbers."
            )
            raise UserError(message)
        if tensor.device != device:
            message = (
                f"Item {item.param_index} has a tensor on {tensor.device}; "
                "all must be where "
                f"`inverse` is, on {device}."
            )
            raise UserError(message)
    if step is not None and (step.device != device or step.dtype != torch.float32):
        message = (
            f"Item {item.param_index} counts steps in {step.dtype} on "
            f"{step.device}; it must be fp32 on {device}, as with capturable=True."
        )
        raise UserError(message)
    states = {state.dtype for state in item.states}
    if len(states) > 1 or torch.float16 in states:
        message = (
            f"Item {item.param_index} keeps its state in "
            f"{', '.join(map(str, states))}; "
            "it "
            "must be all fp32 or all bf16."
        )
        raise UserError(message)
    word = _dtype_name(item.states[0], "state") if states else "none"
    addresses = [tensor.data_ptr() for tensor in tensors]
    aligned = not any(place % _ALIGNED for place in addresses)
    line = [
        *(addresses[0], numel, 0, addresses[1]),
        0 if residual is None else addresses[-1],
        *addresses[2 : 2 + num_states],
        *(0,) * (3 - num_states),
        0 if step is None else step.data_ptr(),
        int(not item.is_first_step),
    ]
    if encoding == "stochastic" or word == "bf16":
        line += bf16_codecs.key(*clock, item.param_index, 0)
        line += bf16_codecs.key(*clock, item.param_index, 1)
    else:
        line += (0, 0, 0, 0)
    return (
        _DTYPE_NAMES[weight.dtype],
        _dtype_name(gradient, "gradient"),
        word,
        aligned,
    ), line


def _dtype_name(tensor: Tensor, role: str) -> str:
    """Return the word that the kernels know a dtype by."""
    if tensor.dtype not in _DTYPE_NAMES:
        message = f"The {role} is {tensor.dtype}; it must be fp32, fp16 or bf16."
        raise UserError(message)
    return _DTYPE_NAMES[tensor.dtype]

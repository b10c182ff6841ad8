"""Launches the Triton kernels of fused updates on CUDA devices.

One launch updates a whole group of tensors in one pass over memory, or changes nothing
if `found_inf` is set on the device, without host-device synchronization.
"""

from __future__ import annotations

import math
import struct
from array import array
from contextlib import nullcontext
from functools import cache, lru_cache, partial, reduce
from importlib import metadata
from importlib.util import find_spec
from itertools import accumulate, compress, repeat
from operator import attrgetter, or_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

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
from halfstep.masters.triton_jit import BEFORE, NUMEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

BLOCK = 1024
"""Elements per program; 4 warps then load bf16 in pieces of 16 bytes."""
CHECK_BLOCK = 4096
"""Elements per program of `check_finite`."""
_CORRECTION_BLOCK = 128
"""Tensors per program of `correct`, which computes bias corrections."""
_MISALIGNED = 16 - 1
"""The bits of an address that are 0 if it is aligned."""
_DTYPE = attrgetter("dtype")
_MIN_CAPABILITY = (7, 5)
"""Lowest compute capability that Triton supports."""

_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    None: "none",
}
Kind = tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]
"""Dtypes of weight, gradient and state, and whether all addresses are aligned."""
_KindT = TypeVar("_KindT", bound=tuple[Any, ...])


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
    """Update tensors and count steps unless `found_inf` is set.

    See `fused_step.Kernel`.

    A first step that is skipped does not fill the momentum buffer: the caller must have
    zeroed it.
    """
    device = inverse.device
    # Keep the tensors alive until the kernels are launched.
    tensors = checked_tensors(items, rule, encoding, device)
    columns, kinds = _columns(items, tensors, encoding, clock)
    adam = isinstance(rule, Adam)
    code = _code()
    with _on(device):
        for (weights, gradients, states, aligned), rows, blocks, table in _tables(
            _rule_words(rule), columns, kinds, BLOCK, device
        ):
            corrections = inverse
            if adam:
                corrections = inverse.new_empty((rows, 2), dtype=torch.float32)
                code["correct"][(-(-rows // _CORRECTION_BLOCK),)](
                    table,
                    rows,
                    corrections,
                    found_inf,
                    block=_CORRECTION_BLOCK,
                    enable_fp_fusion=False,
                )
            if not blocks:
                continue  # they are empty
            code["update"][(blocks,)](
                table,
                rows,
                corrections,
                inverse,
                found_inf,
                rule="adam" if adam else "sgd",
                encoding=encoding,
                weights=_DTYPE_NAMES[weights],
                gradients=_DTYPE_NAMES[gradients],
                states=_DTYPE_NAMES[states],
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
    found_inf, squares, _ = check_each(gradients, norm=norm)
    return found_inf, squares


@torch.no_grad()
def check_each(
    gradients: Sequence[Tensor], *, norm: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what `check_finite` does, and `norms.nonfinite_marks`, in one pass."""
    if not gradients:
        raise UserError("gradients=[] has nothing to look at; give at least one.")
    device = gradients[0].device
    gradients = readable_gradients(gradients, device)
    addresses, numels = ([*map(f, gradients)] for f in (Tensor.data_ptr, Tensor.numel))
    columns = addresses, numels, None, range(len(gradients))
    aligned_column = [not address & _MISALIGNED for address in addresses]
    kinds = [*zip(map(_DTYPE, gradients), aligned_column, strict=True)]
    code = _code()
    with _on(device):
        # found_inf and the marks, cleared in one launch.
        values = torch.zeros(1 + 2 * len(gradients), device=device)
        found_inf, marks = values[0], values[1:].view(2, -1)
        sums: list[Tensor] = []
        for (dtype, aligned), rows, blocks, table in _tables(
            (0, 0, 0, 0), columns, kinds, CHECK_BLOCK, device
        ):
            if not blocks:
                continue  # they are empty
            own = found_inf.new_empty(blocks if norm else 1, dtype=torch.float64)
            code["check_finite"][(blocks,)](
                table,
                rows,
                found_inf,
                *marks,
                own,
                gradients=_DTYPE_NAMES[dtype],
                norm=norm,
                aligned=aligned,
                block=CHECK_BLOCK,
                enable_fp_fusion=False,
            )
            sums.append(own)
        if not norm:
            return found_inf, None, marks
        total = torch.cat(sums) if sums else found_inf.new_zeros(1, dtype=torch.float64)
        return found_inf, total.sum(), marks


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


def _tables(
    header: Sequence[int],
    columns: Sequence[Sequence[int] | None],
    kinds: Sequence[_KindT],
    block: int,
    device: torch.device,
) -> Iterator[tuple[_KindT, int, int, Tensor]]:
    """Yield (kind, number of rows, number of blocks, table on the device) of each kind.

    Columns are lists of numbers, one of each tensor; None is a column of zeros. Whole
    columns are written at once: a loop over tensors takes as long as their kernel. The
    column `triton_jit.BEFORE` is computed here.
    """
    width = len(header)
    for kind in dict.fromkeys(kinds):
        chosen = [*map(kind.__eq__, kinds)]
        rows = sum(chosen)
        flat = [*header, *(0,) * (rows * width)]
        for index, column in enumerate(columns):
            if column is not None:
                flat[width + index :: width] = compress(column, chosen)
        counts = (-(-numel // block) for numel in flat[width + NUMEL :: width])
        *before, blocks = accumulate(counts, initial=0)
        flat[width + BEFORE :: width] = before
        stream = 0
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
        table = _upload(array("q", flat).tobytes(), device, stream)
        yield kind, rows, blocks, table


@lru_cache(maxsize=64)
def _upload(words: bytes, device: torch.device, stream: int) -> Tensor:  # noqa: ARG001 -- other streams must not read before it is copied
    """Copy a table to the device without synchronization.

    The caching allocator gives gradients the same addresses step after step, so most
    tables do not change: those of checks, and of updates while the learning rate stays,
    unless moments or weights are rounded stochastically.
    """
    table = torch.frombuffer(bytearray(words), dtype=torch.int64)
    table = table.pin_memory() if device.type == "cuda" else table
    return table.to(device, non_blocking=True)


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


def _columns(
    items: Sequence[ParamUpdate],
    tensors: UpdateTensors,
    encoding: str,
    clock: tuple[int, int],
) -> tuple[list[Sequence[int] | None], list[Kind]]:
    """Return the columns of a table, and the kernel variant that each item needs."""
    gradients = [*map(Tensor.data_ptr, tensors.gradients)]
    weights, residuals, *states, steps = tensors.addresses
    pointers = [gradients, weights, residuals, *states]
    filled = [not item.is_first_step for item in items]
    columns: list[Sequence[int] | None]
    columns = [gradients, tensors.numels, None, weights, residuals or None, *states]
    columns += [None] * (3 - len(states))
    columns += [steps or None, filled]
    state = items[0].states[0].dtype if states else None
    if encoding == "stochastic" or state == torch.bfloat16:
        key = partial(bf16_codecs.key, *clock)
        words = ((*key(i.param_index, 0), *key(i.param_index, 1)) for i in items)
        columns.extend(zip(*words, strict=True))
    # An address is aligned if its last bits are 0, so all are if those of their OR are.
    joined = map(partial(reduce, or_), zip(*filter(None, pointers), strict=True))
    aligned = [not address & _MISALIGNED for address in joined]
    dtypes = map(_DTYPE, tensors.weights), map(_DTYPE, tensors.gradients)
    return columns, [*zip(*dtypes, repeat(state), aligned, strict=False)]

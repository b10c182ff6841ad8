"""Table of values at which operations, or their derivatives, are infinite or undefined.

It serves replays, which have an operation's arguments, and autograd graphs, which have
the values that the operation saved: a row applies if its operands are available.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfstep.numerics.formats import is_low
from halfstep.numerics.local_tensor import local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def local_data(value: Tensor) -> Tensor:
    """Return the values stored on this rank, without communication."""
    local = local_part(value)
    if local.layout == torch.sparse_coo:
        return local._values()  # noqa: SLF001
    return local if local.layout == torch.strided else local.values()


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float16"."""
    return str(dtype).removeprefix("torch.")


def range_text(dtype: torch.dtype) -> str:
    """Return the largest number of a dtype, such as "float16 holds 65504"."""
    return f"{dtype_name(dtype)} holds {torch.finfo(dtype).max:.6g}"


class DomainError(NamedTuple):
    """Values at which an operation, or its derivative, is infinite or undefined."""

    cause: str
    """"zero", "forward range", "label" or "weight", as in `BadOp`."""
    evidence: str
    advice: str
    result: str = ""
    """"inf" or "NaN" in the forward pass; "" if it may be either or neither."""
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Row:
    ops: str
    operands: str
    """Arguments of `test`, by their names in aten's schema or as saved values."""
    test: Callable[..., Tensor]
    affects: str
    """"forward": only the result; "backward": only the derivative; or "both"."""
    evidence: str
    advice: str
    result: str = ""
    cause: str = "zero"


_AT_0, _BELOW_0 = "its argument is 0", "its argument is negative"
_AT_1 = "its argument is not inside -1 to 1"
_LOG = "Add a small number inside log(), or use a loss that works on logits."
_ROOT = "Add a small number to its argument: its slope at 0 is infinite."
_DIV = "Add a small number to the divisor, or clamp it away from 0."
_ANGLE = "Add a small number to one of its arguments: at 0, 0 its slope is NaN."
_CLAMP = "Clamp its argument to the inside of its domain."
_SKIP = "Skip such a batch, or divide a sum by max(count, 1)."
_EXP = "Subtract the maximum first, or use a function that takes logits."
MASK = "Leave something in each row unmasked, and mask no class that a target names."
FIND = "Find the batch, buffer or frozen weight that brings it in: print them."
CHECKPOINT = "Go back to the last good checkpoint: no loss scale fixes a weight."
UNSCALE = (
    "Divide such gradients by the loss scale before they become part of a loss: "
    "grads / scaler.get_scale(); or take them by session.grad of halfstep.prepare."
)
"""Advice for a penalty on gradients of a scaled loss."""
RUNNING_STATS = (
    "A batch with inf or NaN wrote it, even if its step was skipped: call "
    "reset_running_stats() and run some batches in train mode. A session of "
    "halfstep.prepare restores it when it skips the step."
)


def _is_zero(values: Tensor) -> Tensor:
    return values == 0


@functools.cache
def _atan2_has_slope_at_0() -> bool:
    """Return whether torch's derivative of `atan2` is finite at 0, 0."""
    with torch.enable_grad():
        zero = torch.zeros((), device="cpu", requires_grad=True)
        (slope,) = torch.autograd.grad(torch.atan2(zero, zero), zero)
    return bool(slope.isfinite())


def _both_0(first: Tensor, second: Tensor) -> Tensor:
    return (first == 0) & (second == 0) & (not _atan2_has_slope_at_0())


_LOGS, _NORMS = "log log2 log10", "native_layer_norm native_group_norm"
_BATCH_NORMS = "native_batch_norm native_batch_norm_legit"
_NLL = "nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward"

_INTEGER = "Keep its argument away from 0 and from whole numbers below it."
_VARIANCE = "Go back to the last good checkpoint, or reset the running statistics."

# Norms, prod and cdist have no row: their derivatives in torch are finite at 0.
_ROWS = (
    _Row(_LOGS, "self", _is_zero, "both", _AT_0, _LOG, "inf"),
    _Row(_LOGS, "self", lambda x: x < 0, "forward", _BELOW_0, _CLAMP, "NaN"),
    _Row("log1p", "self", lambda x: x == -1, "both", "its argument is -1", _LOG, "inf"),
    _Row(
        *("log1p", "self", lambda x: x < -1, "forward"),
        *("its argument is below -1", _CLAMP, "NaN"),
    ),
    _Row("sqrt rsqrt", "self", lambda x: x < 0, "both", _BELOW_0, _CLAMP, "NaN"),
    _Row("sqrt rsqrt", "result", torch.isnan, "both", _BELOW_0, _CLAMP, "NaN"),
    _Row("sqrt hypot", "result", _is_zero, "backward", _AT_0, _ROOT),
    _Row("rsqrt reciprocal", "self", _is_zero, "both", _AT_0, _DIV, "inf"),
    _Row("rsqrt reciprocal", "result", torch.isinf, "both", _AT_0, _DIV, "inf"),
    _Row(
        *("pow", "self exponent", lambda x, n: (x == 0) & (n < 0), "both"),
        *("it raises 0 to a power below 0", _DIV, "inf"),
    ),
    _Row(
        *("pow", "self exponent", lambda x, n: (x < 0) & (n != n.round()), "both"),
        *("it raises a negative number to a power that is not whole", _CLAMP),
    ),
    _Row(
        *("pow", "self exponent", lambda x, n: (x == 0) & (n > 0) & (n < 1)),
        *("backward", _AT_0, _ROOT),
    ),
    _Row("atan2", "self other", _both_0, "backward", "both arguments are 0", _ANGLE),
    _Row("div true_divide", "other", _is_zero, "both", "its divisor is 0", _DIV),
    _Row("fmod remainder", "other", _is_zero, "forward", "its divisor is 0", _DIV),
    _Row("acos asin", "self", lambda x: x.abs() > 1, "both", _AT_1, _CLAMP),
    _Row("acos asin", "self", lambda x: x.abs() == 1, "backward", _AT_1, _CLAMP),
    _Row("atanh erfinv", "self", lambda x: x.abs() >= 1, "both", _AT_1, _CLAMP),
    _Row(
        *("logit", "self", lambda x: (x <= 0) | (x >= 1), "forward"),
        *("it is not inside 0 to 1", _CLAMP),
    ),
    _Row(
        *("lgamma digamma", "self", lambda x: (x <= 0) & (x == x.round()), "both"),
        *("it is 0, or a whole number below", _INTEGER),
    ),
    _Row(
        *("exp expm1", "result", torch.isposinf, "both"),
        *("it is inf", _EXP, "inf", "forward range"),
    ),
    _Row(
        *("logsumexp", "result", torch.isneginf, "both"),
        *("all it sums is -inf", MASK, "inf"),
    ),
    _Row(
        *("mean", "self_sym_numel", _is_zero, "forward"),
        *("it is the mean of nothing", _SKIP, "NaN"),
    ),
    _Row(
        *("std var std_mean var_mean", "group_size correction", torch.le, "forward"),
        "it is the deviation of {group_size} number(s)",
        "Take it over two numbers at least, or with correction=0.",
    ),
    _Row(
        f"{_NLL} nll_loss_backward nll_loss2d_backward",
        *("total_weight", _is_zero, "forward"),
        "its mean is over nothing: every label is {ignore_index}, or weighs 0",
        *(_SKIP, "NaN", "label"),
    ),
    _Row(
        *("ctc_loss cudnn_ctc_loss", "result0", torch.isinf, "forward"),
        "an input is too short for its target",
        *("Leave such pairs out, or set zero_infinity=True.", "inf", "label"),
    ),
    _Row(
        f"{_BATCH_NORMS} native_batch_norm_legit_no_training",
        *("running_var", lambda x: x < 0, "forward"),
        *("its running variance is negative", _VARIANCE, "", "weight"),
    ),
    _Row(
        *(f"{_NORMS} {_BATCH_NORMS}", "result2 eps"),
        *(lambda rstd, eps: ~rstd.isfinite() & (eps <= 0), "forward"),
        *("its variance is 0, and so is its eps", "Give the norm an eps above 0."),
    ),
    _Row(
        *("linalg_slogdet", "logabsdet", torch.isneginf, "forward"),
        "the determinant is 0",
        "Add a small multiple of the identity to the matrix.",
    ),
)
_ROWS_OF_OP: defaultdict[str, list[_Row]] = defaultdict(list)
for _row in _ROWS:
    for _op in _row.ops.split():
        _ROWS_OF_OP[_op].append(_row)


def counted(places: Tensor) -> str:
    """Return how many elements are True, such as " at 1 of 3 places"."""
    values = local_data(places)
    count = int(values.sum())
    return f" at {count} of {values.numel()} places" if values.numel() > 1 else ""


def find_domain_error(
    op: str, values: Mapping[str, Any], phase: str
) -> DomainError | None:
    """Return the values at which an operation is infinite or undefined, or None.

    `values` are its arguments by their names in aten's schema, or saved values by
    autograd's names, as far as known. Phase "forward" checks the result, "backward"
    the derivative. Synchronizes with the device.
    """
    for row in _ROWS_OF_OP.get(op.lstrip("_"), ()):
        operands = [values.get(name) for name in row.operands.split()]
        if row.affects not in {phase, "both"} or any(v is None for v in operands):
            continue
        tensors = [local_data(torch.as_tensor(v)) for v in operands]
        # Complex numbers are not ordered.
        if row.test is not _is_zero and any(map(torch.is_complex, tensors)):
            continue
        places = row.test(*tensors)
        if bool(places.any()):
            dtype, given = tensors[0].dtype, tensors[0].real.float()
            copies = (given.half().float(), given.bfloat16().float())
            # A policy may have cast it to fp32; a coarse grid may be that of the data.
            grid = (given * 2**12).round() / 2**12
            exact = [given.equal(each) for each in (*copies, grid)]
            if dtype is torch.float32 and exact == [True, False, False]:
                dtype = torch.float16
            evidence = row.evidence.format_map(values) + counted(places)
            evidence += _lost_eps(row.evidence, dtype)
            return DomainError(row.cause, evidence, row.advice, row.result, dtype)
    return None


def _lost_eps(evidence: str, dtype: torch.dtype | None) -> str:
    """Return, in parentheses, why an existing eps may have no effect in a format."""
    if evidence.endswith(" 0") and dtype == torch.float16:
        least = torch.finfo(dtype).smallest_normal * 2**-10
        return f" (float16 holds nothing below {least:.1g}: a smaller eps is 0)"
    if evidence.endswith(("-1", " 1")) and dtype is not None and is_low(dtype):
        name, below = dtype_name(dtype), 1 - torch.finfo(dtype).eps / 2
        return f" ({name} holds nothing from {below:.4g} to 1: 1 - 1e-06 is 1 there)"
    return ""


def arguments(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outputs: Sequence[Tensor],
) -> dict[str, Any]:
    """Return an operation's arguments and results, by the names in the table.

    A single result is left out, because the arguments are more exact.
    """
    schema = func._schema  # noqa: SLF001
    values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    if len(schema.returns) > 1:
        named = zip(schema.returns, outputs, strict=False)
        for number, (returned, output) in enumerate(named):
            values[returned.name or f"result{number}"] = output
    operand = values.get("self")
    if isinstance(operand, Tensor):
        values["self_sym_numel"] = operand.numel()
        values["group_size"] = operand.numel() // max(1, outputs[0].numel())
    if values.get("correction") is None:
        values["correction"] = 1
    return values


def backward_domain_error(op: str, error: DomainError) -> DomainError:
    """Return a backward operation's error in terms of its forward operation `op`."""
    at, advice = _AT_0, _ROOT
    if op == "log1p":
        at, advice = "its argument is -1", _CLAMP
    elif op.startswith("log") or op == "xlogy":
        advice = _LOG
    elif op in {"acos", "asin", "atanh"}:
        at, advice = "its argument is -1 or 1", _CLAMP
    elif op not in {"sqrt", "pow", "norm", "rsqrt", "hypot", "cdist"}:
        return error
    lost = _lost_eps(at, error.dtype)
    return DomainError("zero", f"its slope is infinite: {at}{lost}", advice)

"""Arguments at which an operation, or its slope, is infinite or undefined.

In: an operation of aten's and what it took and gave. Out: a `DomainError`, or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfstep.nonfinite.saved_values import local_data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class DomainError(NamedTuple):
    """What an operation met."""

    cause: str
    evidence: str
    advice: str


_LOG = "Add a small number inside log(), or use a loss that works on logits."
_ROOT = "Add a small number to its argument: its slope at 0 is infinite."
_DIV = "Add a small number to the divisor, or clamp it away from 0."
_CLAMP = "Clamp its argument to the inside of its domain."
_EPS = "Give the norm an eps above 0."
_LONE = "Take it over two numbers at least, or with correction=0."
_SKIP = "Skip such a batch, or divide a sum by max(count, 1)."
_STORED = "Go back to the last good checkpoint, or reset the running statistics."
_POLE = "Keep its argument away from 0 and from whole numbers below it."
_RIDGE = "Add a small multiple of the identity to the matrix."
_LEAVE = "Leave such pairs out, or set zero_infinity=True."
MASK = "Leave something in each row unmasked."


def find_domain_error(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    """Say what is wrong with an operation's arguments, where that is known.

    Waits for the device.

    Args:
        name: aten's, as `op_names.base` gives it.
        args: Before it ran; all finite.
        kwargs: Likewise.
        outputs: What it gave.
    """
    test = _TESTS.get(name)
    return None if test is None else test(args, kwargs, outputs)


def _count_text(mask: Tensor) -> str:
    local = local_data(mask)
    count = int(local.sum())
    return f" at {count} of {local.numel()} places" if local.numel() > 1 else ""


def _error_where(mask: Tensor, evidence: str, advice: str) -> DomainError | None:
    if not bool(local_data(mask).any()):
        return None
    return DomainError("zero", f"{evidence}{_count_text(mask)}", advice)


def _as_tensor(value: Any) -> Tensor:  # noqa: ANN401 -- a tensor or a number
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _divided(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    del kwargs, outputs
    divisor = _as_tensor(args[1])
    error = _error_where(divisor == 0, "its divisor is 0", _DIV)
    if error is not None and divisor.dtype == torch.float16:
        least = torch.finfo(torch.float16).smallest_normal * 2**-10
        more = f" (float16 holds nothing below {least:.1g}: a smaller eps is 0)"
        error = error._replace(evidence=error.evidence + more)
    return error


def _at(
    *rows: tuple[Callable[[Tensor], Tensor], str, str],
) -> Callable[..., DomainError | None]:
    """Return a test of the first argument, row by row."""

    def test(
        args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
    ) -> DomainError | None:
        del kwargs, outputs
        # Of complex numbers none is below another: only the first row asks for 0.
        checks = rows[:1] if args[0].is_complex() else rows
        errors = (
            _error_where(bad(args[0]), says, advice) for bad, says, advice in checks
        )
        return next(filter(None, errors), None)

    return test


def _power(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    del kwargs, outputs
    base, exponent = _as_tensor(args[0]), _as_tensor(args[1])
    if base.is_complex() or exponent.is_complex():
        return None
    zero = (base == 0) & (exponent < 0)
    # Backwards, a root is a power below 0.
    evidence = "it raises 0 to a power below 0"
    error = _error_where(zero, evidence, _DIV)
    return error or _error_where(
        (base < 0) & (exponent != exponent.round()),
        "it raises a negative number to a power that is not whole",
        _CLAMP,
    )


def _normed(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    """Look at reciprocal deviations, which such an operation also gives."""
    del kwargs
    if float(args[-1]) > 0:
        return None
    infinite = [~local_data(out).isfinite() for out in outputs[1:] if out.numel()]
    if not any(bool(places.any()) for places in infinite):
        return None
    return DomainError("zero", "its variance is 0, and so is its eps", _EPS)


def _batch_normed(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    """Look at a running variance, which is used where there is no other."""
    variance = args[4]
    if isinstance(variance, Tensor) and bool((variance < 0).any()):
        evidence = f"its running variance is negative{_count_text(variance < 0)}"
        return DomainError("weight", evidence, _STORED)
    return _normed(args, kwargs, outputs)


def _flat(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    """Look at the logarithm of a determinant."""
    del args, kwargs
    return _error_where(outputs[1].isneginf(), "the determinant is 0", _RIDGE)


def _spread(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    correction = kwargs.get("correction", args[2] if len(args) > 2 else 1)  # noqa: PLR2004
    count = args[0].numel() / max(1, outputs[0].numel())
    if count > float(1 if correction is None else correction):
        return None
    evidence = f"it is the deviation of {count:.0f} number{'s' * (count > 1)}"
    return DomainError("zero", evidence, _LONE)


def _mean(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    del kwargs, outputs
    if args[0].numel():
        return None
    return DomainError("zero", "it is the mean of nothing", _SKIP)


def _nll(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    del kwargs
    if len(outputs) > 1 and bool(outputs[1] == 0):
        evidence = f"its mean is over nothing: every label is {args[4]}, or weighs 0"
        return DomainError("label", evidence, _SKIP)
    return None


def _nll_back(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    del kwargs, outputs
    if isinstance(args[-1], Tensor) and bool((args[-1] == 0).all()):
        evidence = f"its mean is over nothing: every label is {args[5]}, or weighs 0"
        return DomainError("label", evidence, _SKIP)
    return None


def _aligned(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> DomainError | None:
    del args, kwargs
    error = _error_where(
        outputs[0].isinf(), "an input is too short for its target", _LEAVE
    )
    return error and error._replace(cause="label")


_ZERO, _BELOW = "its argument is 0", "its argument is negative"
_LOGARITHM = _at((lambda x: x == 0, _ZERO, _LOG), (lambda x: x < 0, _BELOW, _CLAMP))
_OUTSIDE = _at((lambda x: x.abs() > 1, "its argument is not inside -1 to 1", _CLAMP))
_EDGE = _at((lambda x: x.abs() >= 1, "its argument is not inside -1 to 1", _CLAMP))
_POLES = _at(
    (lambda x: (x <= 0) & (x == x.round()), "it is 0, or a whole number below", _POLE)
)
_TESTS: dict[str, Callable[..., DomainError | None]] = {
    "div": _divided,
    "true_divide": _divided,
    "fmod": _divided,
    "remainder": _divided,
    "log": _LOGARITHM,
    "log2": _LOGARITHM,
    "log10": _LOGARITHM,
    "log1p": _at((lambda x: x <= -1, "its argument is -1 or below", _LOG)),
    "sqrt": _at((lambda x: x < 0, _BELOW, _CLAMP)),
    "rsqrt": _at((lambda x: x == 0, _ZERO, _DIV), (lambda x: x < 0, _BELOW, _CLAMP)),
    "reciprocal": _at((lambda x: x == 0, _ZERO, _DIV)),
    "pow": _power,
    "acos": _OUTSIDE,
    "asin": _OUTSIDE,
    "atanh": _EDGE,
    "erfinv": _EDGE,
    "logit": _at((lambda x: (x <= 0) | (x >= 1), "it is not inside 0 to 1", _CLAMP)),
    "native_layer_norm": _normed,
    "native_group_norm": _normed,
    "native_batch_norm": _batch_normed,
    "_native_batch_norm_legit": _batch_normed,
    "_native_batch_norm_legit_no_training": _batch_normed,
    "_linalg_slogdet": _flat,
    "lgamma": _POLES,
    "digamma": _POLES,
    "std": _spread,
    "var": _spread,
    "var_mean": _spread,
    "std_mean": _spread,
    "mean": _mean,
    "nll_loss_forward": _nll,
    "nll_loss2d_forward": _nll,
    "nll_loss_backward": _nll_back,
    "nll_loss2d_backward": _nll_back,
    "_ctc_loss": _aligned,
    "_cudnn_ctc_loss": _aligned,
}

_ROOTS = {"sqrt", "pow", "norm", "rsqrt", "hypot", "cdist"}


def backward_domain_error(op_name: str, error: DomainError) -> DomainError:
    """Return what is wrong, said of the operation whose slope is computed.

    Args:
        op_name: Of that operation.
        error: Of the one that computes its slope.
    """
    if op_name in _ROOTS:
        return DomainError("zero", f"its slope is infinite: {_ZERO}", _ROOT)
    if op_name.startswith("log"):
        return DomainError("zero", f"its slope is infinite: {_ZERO}", _LOG)
    if op_name in {"acos", "asin", "atanh"}:
        return DomainError(
            "zero", "its slope is infinite: its argument is -1 or 1", _CLAMP
        )
    return error

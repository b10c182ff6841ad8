"""Arguments at which an operation, or its slope, is infinite or undefined.

In: an operation of aten's and what it took and gave. Out: a `Flaw` in words, or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfstep.nonfinite.saved_values import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Flaw(NamedTuple):
    """What an operation met."""

    cause: str
    says: str
    advice: str


_LOG = "Add a small number inside log(), or use a loss that works on logits."
_ROOT = "Add a small number to its argument: its slope at 0 is infinite."
_DIV = "Add a small number to the divisor, or clamp it away from 0."
_CLAMP = "Clamp its argument to the inside of its domain."
_EPS = "Give the norm an eps above 0."
_LONE = "Take it over two numbers at least, or with correction=0."
_SKIP = "Skip such a batch, or divide a sum by max(count, 1)."
_STORED = "Go back to the last good checkpoint, or reset the running statistics."
_WHOLE = "Keep its argument away from 0 and from whole numbers below it."
_RIDGE = "Add a small multiple of the identity to the matrix."
_LEAVE = "Leave such pairs out, or set zero_infinity=True."
MASK = "Leave something in each row unmasked."


def flaw(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
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


def _count(places: Tensor) -> str:
    held = plain(places)
    count = int(held.sum())
    return f" at {count} of {held.numel()} places" if held.numel() > 1 else ""


def _if(places: Tensor, says: str, advice: str) -> Flaw | None:
    if not bool(plain(places).any()):
        return None
    return Flaw("zero", f"{says}{_count(places)}", advice)


def _number(value: Any) -> Tensor:  # noqa: ANN401 -- a tensor or a number
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _divided(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    del kwargs, outputs
    divisor = _number(args[1])
    found = _if(divisor == 0, "its divisor is 0", _DIV)
    if found is not None and divisor.dtype == torch.float16:
        least = torch.finfo(torch.float16).smallest_normal * 2**-10
        more = f" (float16 holds nothing below {least:.1g}: a smaller eps is 0)"
        found = found._replace(says=found.says + more)
    return found


def _at(
    *rows: tuple[Callable[[Tensor], Tensor], str, str],
) -> Callable[..., Flaw | None]:
    """Return a test of the first argument, row by row."""

    def test(
        args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
    ) -> Flaw | None:
        del kwargs, outputs
        # Of complex numbers none is below another: only the first row asks for 0.
        asked = rows[:1] if args[0].is_complex() else rows
        found = (_if(bad(args[0]), says, advice) for bad, says, advice in asked)
        return next(filter(None, found), None)

    return test


def _power(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    del kwargs, outputs
    base, exponent = _number(args[0]), _number(args[1])
    if base.is_complex() or exponent.is_complex():
        return None
    zero = (base == 0) & (exponent < 0)
    # Backwards, a root is a power below 0.
    says = "it raises 0 to a power below 0"
    found = _if(zero, says, _DIV)
    return found or _if(
        (base < 0) & (exponent != exponent.round()),
        "it raises a negative number to a power that is not whole",
        _CLAMP,
    )


def _normed(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    """Look at reciprocal deviations, which such an operation also gives."""
    del kwargs
    if float(args[-1]) > 0:
        return None
    infinite = [~plain(out).isfinite() for out in outputs[1:] if out.numel()]
    if not any(bool(places.any()) for places in infinite):
        return None
    return Flaw("zero", "its variance is 0, and so is its eps", _EPS)


def _batch_normed(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    """Look at a running variance, which is used where there is no other."""
    variance = args[4]
    if isinstance(variance, Tensor) and bool((variance < 0).any()):
        says = f"its running variance is negative{_count(variance < 0)}"
        return Flaw("weight", says, _STORED)
    return _normed(args, kwargs, outputs)


def _flat(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    """Look at the logarithm of a determinant."""
    del args, kwargs
    return _if(outputs[1].isneginf(), "the determinant is 0", _RIDGE)


def _spread(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    correction = kwargs.get("correction", args[2] if len(args) > 2 else 1)  # noqa: PLR2004
    count = args[0].numel() / max(1, outputs[0].numel())
    if count > float(1 if correction is None else correction):
        return None
    says = f"it is the deviation of {count:.0f} number{'s' * (count > 1)}"
    return Flaw("zero", says, _LONE)


def _mean(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    del kwargs, outputs
    if args[0].numel():
        return None
    return Flaw("zero", "it is the mean of nothing", _SKIP)


def _nll(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    del kwargs
    if len(outputs) > 1 and bool(outputs[1] == 0):
        says = f"its mean is over nothing: every label is {args[4]}, or weighs 0"
        return Flaw("label", says, _SKIP)
    return None


def _nll_back(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    del kwargs, outputs
    if isinstance(args[-1], Tensor) and bool((args[-1] == 0).all()):
        says = f"its mean is over nothing: every label is {args[5]}, or weighs 0"
        return Flaw("label", says, _SKIP)
    return None


def _aligned(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Flaw | None:
    del args, kwargs
    found = _if(outputs[0].isinf(), "an input is too short for its target", _LEAVE)
    return found and found._replace(cause="label")


_ZERO, _BELOW = "its argument is 0", "its argument is negative"
_LOGARITHM = _at((lambda x: x == 0, _ZERO, _LOG), (lambda x: x < 0, _BELOW, _CLAMP))
_OUTSIDE = _at((lambda x: x.abs() > 1, "its argument is not inside -1 to 1", _CLAMP))
_EDGE = _at((lambda x: x.abs() >= 1, "its argument is not inside -1 to 1", _CLAMP))
_POLES = _at(
    (lambda x: (x <= 0) & (x == x.round()), "it is 0, or a whole number below", _WHOLE)
)
_TESTS: dict[str, Callable[..., Flaw | None]] = {
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


def backward_flaw(word: str, found: Flaw) -> Flaw:
    """Return what is wrong, said of the operation whose slope is computed.

    Args:
        word: Of that operation.
        found: Of the one that computes its slope.
    """
    if word in _ROOTS:
        return Flaw("zero", f"its slope is infinite: {_ZERO}", _ROOT)
    if word.startswith("log"):
        return Flaw("zero", f"its slope is infinite: {_ZERO}", _LOG)
    if word in {"acos", "asin", "atanh"}:
        return Flaw("zero", "its slope is infinite: its argument is -1 or 1", _CLAMP)
    return found

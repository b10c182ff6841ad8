"""Reads values from untrusted JSON, checking types; writes non-finite numbers."""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, Any, NoReturn

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_LARGEST = 1 << 63


def _refuse(key: str, value: object, expected: str) -> NoReturn:
    raise UserError(f"{key!r} is {reprlib.repr(value)}; it must be {expected}.")


def plain(value: Any, spell: Callable[[float], object] = str) -> Any:  # noqa: ANN401 -- JSON
    """Return a nested value with non-finite numbers as text, which `real` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return spell(value)
    if isinstance(value, dict):
        return {key: plain(item, spell) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, spell) for item in value]
    return value


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """Return `value`, which must be a JSON object."""
    if not isinstance(value, dict):
        _refuse(what, value, "an object")
    return value


def items(value: object, what: str) -> list[Any]:
    """Return `value`, which must be a JSON array."""
    if not isinstance(value, list | tuple):
        _refuse(what, value, "an array")
    return list(value)


def real(value: object, what: str) -> float:
    """Return a number; also "inf", "-inf" and "nan", and NaN for null."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(what, value, "a number")
    try:
        return float(value)
    except OverflowError:
        _refuse(what, value, "a number")


def number(data: Mapping[str, Any], key: str) -> float | None:
    """Return the number at a key: NaN for null, None if the key is missing."""
    return real(data[key], key) if key in data else None


def non_negative(data: Mapping[str, Any], key: str) -> float:
    """Return the finite number >= 0 at a key; 0 if the key is missing."""
    value = real(data.get(key, 0.0), key)
    if not 0 <= value < math.inf:
        _refuse(key, data[key], "a finite number of at least 0")
    return value


def fraction(data: Mapping[str, Any], key: str) -> float:
    """Return the number from 0 to 1 at a key, which must exist."""
    raw = data.get(key)
    value = real(raw, key)
    if not 0 <= value <= 1:
        _refuse(key, raw, "a number from 0 to 1")
    return value


def loss_scale(data: Mapping[str, Any], key: str) -> float | None:
    """Return the loss scale at a key; None for null or a missing key."""
    if data.get(key) is None:
        return None
    value = real(data[key], key)
    if not is_scale(value):
        _refuse(key, data[key], "a number that fp32 holds, above 0")
    return value


def is_scale(value: float) -> bool:
    """Return whether a number can be a loss scale, which is fp32."""
    return 2.0**-149 <= value < 2.0**128


def integer(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the integer >= 0 at a key; without a default the key must exist."""
    value = data.get(key, default)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < _LARGEST:
        _refuse(key, value, "a whole number of at least 0")
    return int(value)


def optional_text(data: Mapping[str, Any], key: str) -> str | None:
    """Return the text at a key; None for null or a missing key."""
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        _refuse(key, value, "text")
    return value


def text(data: Mapping[str, Any], key: str) -> str:
    """Return the text at a key, which must exist."""
    value = optional_text(data, key)
    if value is None:
        _refuse(key, value, "text")
    return value


def optional_bool(data: Mapping[str, Any], key: str) -> bool | None:
    """Return the bool at a key; None for null or a missing key."""
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        _refuse(key, value, "true or false")
    return value


def texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the texts in the array at a key; () for a missing key."""
    values = items(data.get(key) or (), key)
    if not all(isinstance(each, str) for each in values):
        _refuse(key, values, "an array of texts")
    return tuple(values)

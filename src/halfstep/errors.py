"""`UserError` for unusable arguments, checks that raise it, and warnings."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from numbers import Real

_INTERNAL_PACKAGES = ("halfstep", "torch", "contextlib", "copy")
_MAX_CHARS = 60
_MAX_INT = 2**63 - 1


class UserError(ValueError):
    """An argument, a file or a flag cannot be used; the message says what is right.

    The command line prints it as one line, with exit status 2. It is a `ValueError`, so
    that programs that catch those keep working.

    Example:
        >>> from halfstep import levels
        >>> try:
        ...     levels.parse("O4")
        ... except UserError as error:
        ...     print(error)
        level='O4' is not a level; choose auto, O0, O1, O2, O3.
    """


def require(name: str, value: object, valid: bool, expected: str) -> None:
    """Raise `UserError` for a value out of range.

    Args:
        name: Name of the argument.
        value: Value that was passed.
        valid: Whether the value is valid.
        expected: Description of valid values.

    Raises:
        UserError: If `valid` is false.
    """
    if not valid:
        raise UserError(f"{name}={format_value(value)} must be {expected}.")


def require_type(name: str, value: object, valid: bool, expected: str) -> None:
    """Raise `UserError` for a value of another type, which is not printed.

    Args:
        name: Name of the argument.
        value: Value that was passed; its text may fill pages.
        valid: Whether the type is right.
        expected: Description of the type.

    Raises:
        UserError: If `valid` is false.
    """
    if not valid:
        kind = f"of type {type(value).__name__}"
        if isinstance(value, type):
            kind = f"the class {value.__name__}"
        raise UserError(f"{name} is {kind}; it must be {expected}.")


def warn_caller(message: str) -> None:
    """Warn with the innermost line that is neither in this package nor in torch."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 -- the only way before 3.12
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL_PACKAGES
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def format_value(value: object) -> str:
    """Return a value as shown in messages: numbers and text, others by their type.

    Why: an array's text fills pages, and a function's is an address.
    """
    if isinstance(value, type):
        return f"<class {value.__name__}>"
    if not isinstance(value, str | bytes | Real | complex | None):
        # Dtypes and similar objects are one word without an address.
        text = str(value) if "dtype" in type(value).__name__ else ""
        return text or f"<{type(value).__name__}>"
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


def require_int(name: str, value: object, minimum: int) -> int:
    """Return an integer, of any integer type.

    Raises:
        UserError: If it is not an integer, is too small, or is a bool.
    """
    expected = f"a whole number of at least {minimum}"
    # Also numpy's bool, which old versions of numpy accept as an index.
    is_bool = type(value).__name__ in {"bool", "bool_"}
    try:
        number = -1 if is_bool else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    require(name, value, number >= minimum, expected)
    require(name, value, number <= _MAX_INT, "a whole number below 2**63")
    return number


def require_positive(name: str, value: object, expected: str) -> float:
    """Return a number above 0; inf is allowed.

    Raises:
        UserError: If it is not a number, is NaN or a bool, or too large for a float.
    """
    number = to_float(value)
    require(name, value, number > 0, expected)
    return number


def to_float(value: object) -> float:
    """Return a number as a float; NaN for a bool, and for what a float cannot hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def require_bool(name: str, value: object) -> bool:
    """Return a bool; numpy's bools are accepted.

    Raises:
        UserError: If it is not a bool: the text "no" would count as true.
    """
    require(name, value, type(value).__name__ in {"bool", "bool_"}, "True or False")
    return bool(value)

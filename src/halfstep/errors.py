"""The one exception that means "what you gave cannot be used", and warnings.

In: a message. Out: `UserError`, which the command line prints as one line; or a warning
that points at the line of the program that called this package.
"""

from __future__ import annotations

import sys
import warnings

_OURS = ("halfstep", "torch", "contextlib")


class UserError(ValueError):
    """What the user gave cannot be used; the text says what would be right.

    Why: the command line turns this into one line and a non-zero exit, and lets any
    other exception through as the defect it is. A program that already catches
    `ValueError` keeps working.
    """


def require(name: str, value: object, good: bool, right: str) -> None:
    """Refuse a value that is out of its range.

    Args:
        name: Of the argument.
        value: What was given.
        good: Whether it will do.
        right: What would, in words.

    Raises:
        UserError: If it will not.
    """
    if not good:
        message = f"{name}={value!r} must be {right}."
        raise UserError(message)


def require_kind(name: str, value: object, good: bool, right: str) -> None:
    """Refuse a value of another kind, whose text may fill pages.

    Args:
        name: Of the argument.
        value: What was given.
        good: Whether it is of the kind.
        right: The kind, in words.

    Raises:
        UserError: If it is not.
    """
    if not good:
        message = f"{name} is of type {type(value).__name__}; it must be {right}."
        raise UserError(message)


def warn_caller(message: str) -> None:
    """Warn at the innermost line that is neither of this package nor of torch."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 -- the only way before 3.12
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)

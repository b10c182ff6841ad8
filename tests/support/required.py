"""A value that a test needs."""

from typing import TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """Return a value that must not be None."""
    assert value is not None
    return value

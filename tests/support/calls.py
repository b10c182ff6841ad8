"""How much work a function is, counted and not timed."""

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def calls_of(function: Callable[[], T]) -> tuple[T, int]:
    """Return what a function returns, and the calls and returns inside it."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, calls

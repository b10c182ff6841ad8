"""Excludes functions from `torch.compile`."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def dynamo_disable(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile does not trace, nor what it calls.

    Why: after a graph break torch.compile still tries to trace every function that the
    broken one calls, including halfstep's bookkeeping.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Importing torch._dynamo takes a second; before, nothing can be traced.
        spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
        imported = spec is not None and not getattr(spec, "_initializing", False)
        return (disabled if imported else function)(*args, **kwargs)

    return run

"""Functions that `torch.compile` does not trace."""

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
    """Return a function into which torch.compile does not look.

    Why: where it gives up on a function it still tries all that this calls, our own
    bookkeeping too.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # The import takes a second; before its end nothing can be traced.
        spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
        imported = spec is not None and not getattr(spec, "_initializing", False)
        return (disabled if imported else function)(*args, **kwargs)

    return run

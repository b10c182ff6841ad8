"""`record_function` labels for work that torch's profiler cannot see."""

from __future__ import annotations

import contextlib

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

PREFIX = "halfstep::"
"""Prefix of the labels."""
UPDATE = f"{PREFIX}update"
"""Label of gradient checks and weight updates in C."""

_NULL_CONTEXT = contextlib.nullcontext()


def record_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that a running profiler shows as `name`."""
    return record_function(name) if _profiler_enabled() else _NULL_CONTEXT

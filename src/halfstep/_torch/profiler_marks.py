"""`record_function` labels for what torch's profiler cannot see into."""

from __future__ import annotations

import contextlib

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

PREFIX = "halfstep::"
"""How their names begin."""
UPDATE = f"{PREFIX}update"
"""Reading gradients and updating weights in C."""

_NULL_CONTEXT = contextlib.nullcontext()


def record_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a region that the profiler shows under a name, if one is at work."""
    return record_function(name) if _profiler_enabled() else _NULL_CONTEXT

"""Labels for work that torch's profiler cannot see.

`record_range(name)` is a context that a running profiler shows as `name`.
"""

from __future__ import annotations

from torch._C._profiler import _RecordFunctionFast as record_range

PREFIX = "halfstep::"
UPDATE = f"{PREFIX}update"
"""Label of gradient checks and weight updates in C."""

__all__ = ["PREFIX", "UPDATE", "record_range"]

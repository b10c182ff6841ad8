"""Implements the interface of NVIDIA's `apex.amp`, which was removed in 2025.

Replace `from apex import amp` by `from halfstep.compat.apex import amp`; this works on
a CPU too. `docs/apex.md` lists what differs.
"""

from __future__ import annotations

import sys

from halfstep.compat.apex import amp, parallel

__all__ = ["amp", "install", "parallel"]


def install() -> None:
    """Make `import apex` import this package, in this process.

    For programs that cannot be edited: call it before they are imported.
    """
    sys.modules["apex"] = sys.modules[__name__]
    sys.modules["apex.amp"] = amp
    sys.modules["apex.parallel"] = parallel

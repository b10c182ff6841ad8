"""The interface of NVIDIA's apex, which was removed in 2025, over halfstep.

In: a program written for `from apex import amp`. Out: the same program after
`from halfstep.compat.apex import amp`, on a CPU too. `docs/apex.md` lists what differs.
"""

from __future__ import annotations

import sys
from importlib import import_module

import halfstep.compat.apex.amp
import halfstep.compat.apex.fp16_utils
import halfstep.compat.apex.optimizers
import halfstep.compat.apex.parallel  # noqa: F401 -- `apex.parallel` is what callers write


def install() -> None:
    """Let `import apex` find this package from now on, in this process.

    For programs that cannot be edited: call it before they are imported.
    """
    sys.modules["apex"] = sys.modules[__name__]
    for name in ("amp", "fp16_utils", "optimizers", "parallel"):
        sys.modules[f"apex.{name}"] = import_module(f"{__name__}.{name}")

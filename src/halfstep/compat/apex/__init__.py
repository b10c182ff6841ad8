"""Implements the interface of NVIDIA's `apex.amp`, which was removed in 2025.

Replace `from apex import amp` by `from halfstep.compat.apex import amp`; this works on
a CPU too. `docs/apex.md` lists what differs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from halfstep.compat.apex import amp, parallel
from halfstep.compat.apex.amp_handle import AmpHandle
from halfstep.compat.apex.optimizer_state import AmpScaler
from halfstep.compat.apex.state import STATE, AmpState, maybe_print

__all__ = ["amp", "install", "parallel"]

_SUBMODULES: dict[str, dict[str, Any]] = {
    "amp._amp_state": {
        "_amp_state": STATE,
        "AmpState": AmpState,
        "master_params": amp.master_params,
        "maybe_print": maybe_print,
    },
    "amp.frontend": {
        "initialize": amp.initialize,
        "state_dict": amp.state_dict,
        "load_state_dict": amp.load_state_dict,
    },
    "amp.handle": {
        "AmpHandle": AmpHandle,
        "scale_loss": amp.scale_loss,
        "disable_casts": amp.disable_casts,
    },
    "amp.scaler": {"LossScaler": AmpScaler},
}
"""Submodule of apex -> the names that programs import from it."""


def install() -> None:
    """Make `import apex` import this package, in this process.

    For programs that cannot be edited: call it before they are imported.
    """
    sys.modules["apex"] = sys.modules[__name__]
    sys.modules["apex.amp"] = amp
    sys.modules["apex.parallel"] = parallel
    for path, names in _SUBMODULES.items():
        module = ModuleType(f"apex.{path}", f"`{path}` of apex.")
        vars(module).update(names)
        sys.modules[module.__name__] = module
        name = path.removeprefix("amp.")
        # As in apex, the name `_amp_state` is the object, not the submodule.
        if not hasattr(amp, name):
            setattr(amp, name, module)

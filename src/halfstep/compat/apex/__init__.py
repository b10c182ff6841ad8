"""Implements the interface of NVIDIA's `apex.amp`, which was removed in 2025.

Replace `from apex import amp` by `from halfstep.compat.apex import amp`; this works on
a CPU too. `docs/apex.md` lists what differs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from halfstep.compat.apex import (
    amp,
    amp_C,
    fp16_utils,
    multi_tensor_apply,
    optimizers,
    parallel,
)
from halfstep.compat.apex.amp_handle import AmpHandle
from halfstep.compat.apex.optimizer_state import AmpScaler
from halfstep.compat.apex.state import STATE, AmpState, maybe_print

__all__ = [
    "amp",
    "amp_C",
    "fp16_utils",
    "install",
    "multi_tensor_apply",
    "optimizers",
    "parallel",
]

_MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (amp, fp16_utils, multi_tensor_apply, optimizers, parallel)
}
_FP16_NAMES = {name: getattr(fp16_utils, name) for name in fp16_utils.__all__}
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
    "fp16_utils.fp16_optimizer": _FP16_NAMES,
    "fp16_utils.fp16util": _FP16_NAMES,
    "fp16_utils.loss_scaler": _FP16_NAMES,
    "multi_tensor_apply.multi_tensor_apply": {
        "MultiTensorApply": multi_tensor_apply.MultiTensorApply
    },
    "parallel.LARC": {"LARC": parallel.LARC},
}
"""Submodule of apex -> the names that programs import from it."""


def install() -> None:
    """Make `import apex` and `import amp_C` import this package, in this process.

    For programs that cannot be edited: call it before they are imported.
    """
    sys.modules["apex"] = sys.modules[__name__]
    sys.modules["amp_C"] = amp_C
    for name, module in _MODULES.items():
        sys.modules[f"apex.{name}"] = module
    for path, names in _SUBMODULES.items():
        module = ModuleType(f"apex.{path}", f"`{path}` of apex.")
        vars(module).update(names)
        sys.modules[module.__name__] = module
        parent, _, name = path.partition(".")
        # As in apex, the names `_amp_state` and `LARC` are the object and the class,
        # not the submodules.
        if not hasattr(_MODULES[parent], name):
            setattr(_MODULES[parent], name, module)

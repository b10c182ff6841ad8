"""halfstep: mixed-precision training on PyTorch that says what it did.

In: a model and an optimizer. Out: the same two, prepared to train in a 16-bit format
where that is safe, and a report of every step. The names below are the public API;
they load on first use, so that `import halfstep` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep import checkpoint, formats, levels, machine, policy, scaler, sharded
    from halfstep.cast_cache import CastCache
    from halfstep.casting import autocast
    from halfstep.diagnosis import diagnose
    from halfstep.errors import UserError
    from halfstep.functions import (
        custom_bwd,
        custom_fwd,
        full_precision,
        low_precision,
        promote,
    )
    from halfstep.grad_scaler import GradScaler
    from halfstep.master import MasterWeights
    from halfstep.mismatch import DtypeMismatch
    from halfstep.policy import Decision, Policy, Rule
    from halfstep.preflight import check
    from halfstep.preparing import prepare
    from halfstep.probe import Probe
    from halfstep.replay import first_bad
    from halfstep.scaler import LossScaleCollapse
    from halfstep.session import Session
    from halfstep.stats import StepReport
    from halfstep.tensor_stats import TensorStats

__version__ = "0.1.0"

_ROOM_OF = {
    "CastCache": "cast_cache",
    "Decision": "policy",
    "DtypeMismatch": "mismatch",
    "GradScaler": "grad_scaler",
    "LossScaleCollapse": "scaler",
    "MasterWeights": "master",
    "Policy": "policy",
    "Probe": "probe",
    "Rule": "policy",
    "Session": "session",
    "StepReport": "stats",
    "TensorStats": "tensor_stats",
    "UserError": "errors",
    "autocast": "casting",
    "check": "preflight",
    "custom_bwd": "functions",
    "custom_fwd": "functions",
    "diagnose": "diagnosis",
    "first_bad": "replay",
    "full_precision": "functions",
    "low_precision": "functions",
    "prepare": "preparing",
    "promote": "functions",
}
_ROOMS = ("checkpoint", "formats", "levels", "machine", "policy", "scaler", "sharded")

__all__ = [
    "CastCache",
    "Decision",
    "DtypeMismatch",
    "GradScaler",
    "LossScaleCollapse",
    "MasterWeights",
    "Policy",
    "Probe",
    "Rule",
    "Session",
    "StepReport",
    "TensorStats",
    "UserError",
    "autocast",
    "check",
    "checkpoint",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "first_bad",
    "formats",
    "full_precision",
    "levels",
    "low_precision",
    "machine",
    "policy",
    "prepare",
    "promote",
    "scaler",
    "sharded",
]


if not TYPE_CHECKING:  # a type checker must still see a misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name on first use."""
        if name in _ROOM_OF:
            room = import_module(f"halfstep.{_ROOM_OF[name]}")
            value: object = getattr(room, name)
        elif name in _ROOMS:
            value = import_module(f"halfstep.{name}")
        else:
            message = f"module 'halfstep' has no attribute {name!r}"
            raise AttributeError(message)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)

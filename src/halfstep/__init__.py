"""halfstep: mixed-precision training on PyTorch that reports what it did.

`prepare` takes a model and an optimizer and returns a session that trains them in a
16-bit format where that is safe, with a report of every step. The names below are the
public API; they load on first use, so that `import halfstep` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep import checkpoint, machine, policy, scaling
    from halfstep.casting.autocast_mode import autocast
    from halfstep.casting.custom_functions import (
        custom_bwd,
        custom_fwd,
        full_precision,
        low_precision,
        promote,
    )
    from halfstep.casting.dtype_mismatch import DtypeMismatch
    from halfstep.casting.weight_cache import CastCache
    from halfstep.diagnostics.preflight import check
    from halfstep.diagnostics.probe import Probe
    from halfstep.diagnostics.replay import find_nonfinite
    from halfstep.diagnostics.step_diagnosis import diagnose
    from halfstep.errors import UserError
    from halfstep.fast_dropout import use_fast_dropout
    from halfstep.graph.planner import plan
    from halfstep.graph.rewrite import rewrite
    from halfstep.masters import MasterWeights
    from halfstep.numerics import formats
    from halfstep.numerics.tensor_stats import TensorStats
    from halfstep.parity.compare_levels import compare
    from halfstep.policy import Decision, Policy, Rule, levels
    from halfstep.scaling import LossScaleCollapse
    from halfstep.scaling.grad_scaler import GradScaler
    from halfstep.scaling.step_report import StepReport
    from halfstep.session import fsdp_checkpoint as fsdp
    from halfstep.session.factory import prepare
    from halfstep.session.session import Session

__version__ = "0.1.0"

_MODULE_OF_NAME = {
    "CastCache": "casting.weight_cache",
    "Decision": "policy",
    "DtypeMismatch": "casting.dtype_mismatch",
    "GradScaler": "scaling.grad_scaler",
    "LossScaleCollapse": "scaling",
    "MasterWeights": "masters",
    "Policy": "policy",
    "Probe": "diagnostics.probe",
    "Rule": "policy",
    "Session": "session.session",
    "StepReport": "scaling.step_report",
    "TensorStats": "numerics.tensor_stats",
    "UserError": "errors",
    "autocast": "casting.autocast_mode",
    "check": "diagnostics.preflight",
    "compare": "parity.compare_levels",
    "custom_bwd": "casting.custom_functions",
    "custom_fwd": "casting.custom_functions",
    "diagnose": "diagnostics.step_diagnosis",
    "find_nonfinite": "diagnostics.replay",
    "full_precision": "casting.custom_functions",
    "low_precision": "casting.custom_functions",
    "plan": "graph.planner",
    "prepare": "session.factory",
    "promote": "casting.custom_functions",
    "rewrite": "graph.rewrite",
    "use_fast_dropout": "fast_dropout",
}
_MODULES = {
    "checkpoint": "checkpoint",
    "formats": "numerics.formats",
    "fsdp": "session.fsdp_checkpoint",
    "levels": "policy.levels",
    "machine": "machine",
    "policy": "policy",
    "scaling": "scaling",
}

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
    "compare",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "find_nonfinite",
    "formats",
    "fsdp",
    "full_precision",
    "levels",
    "low_precision",
    "machine",
    "plan",
    "policy",
    "prepare",
    "promote",
    "rewrite",
    "scaling",
    "use_fast_dropout",
]


if not TYPE_CHECKING:  # type checkers must still report misspelled names

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name in _MODULE_OF_NAME:
            module = import_module(f"halfstep.{_MODULE_OF_NAME[name]}")
            value: object = getattr(module, name)
        elif name in _MODULES:
            value = import_module(f"halfstep.{_MODULES[name]}")
        else:
            raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)

"""Exports the names of apex's `amp`."""

from halfstep.compat.apex.amp_handle import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from halfstep.compat.apex.frontend import (
    disable_casts,
    init,
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)
from halfstep.compat.apex.state import STATE, AmpError

_amp_state = STATE

__all__ = [
    "AmpError",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

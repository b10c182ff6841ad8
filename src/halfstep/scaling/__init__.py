"""Loss scaling.

`ScaleRule`, `ScaleState` and `advance` compute the scale; `unscale_` unscales and
checks gradients; `LossScaler` combines them for lists of tensors; `LossScaleCollapse`
is raised when no scale can help.
"""

from halfstep.scaling.collapse import LossScaleCollapse
from halfstep.scaling.loss_scale import ScaleRule, ScaleState
from halfstep.scaling.loss_scaler import LossScaler, advance
from halfstep.scaling.unscale import unscale_

__all__ = [
    "LossScaleCollapse",
    "LossScaler",
    "ScaleRule",
    "ScaleState",
    "advance",
    "unscale_",
]

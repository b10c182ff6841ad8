"""Loss scaling: the rule, the pass over gradients, the strategies, the diagnosis.

`ScaleRule`, `ScaleState` and `advance` are the pure core; `unscale_` is the one pass
over gradients; `LossScaler` puts them to work on lists of tensors; `LossScaleCollapse`
is how a run ends that no scale can save.
"""

from halfstep.scaling.collapse import LossScaleCollapse
from halfstep.scaling.loss_scale import ScaleRule, ScaleState, advance
from halfstep.scaling.loss_scaler import LossScaler
from halfstep.scaling.unscale import unscale_

__all__ = [
    "LossScaleCollapse",
    "LossScaler",
    "ScaleRule",
    "ScaleState",
    "advance",
    "unscale_",
]

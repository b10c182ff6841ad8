"""Before training: will this model, on this batch, train at this level?

In: a model, a loss function, a batch, a level. Out: a `CheckReport`: overflow and who
made it, the largest safe loss scale, gradients beside fp32's, time, memory, a verdict.
"""

from halfstep.diagnostics.preflight.model_check import check
from halfstep.diagnostics.preflight.report import CheckReport

__all__ = ["CheckReport", "check"]

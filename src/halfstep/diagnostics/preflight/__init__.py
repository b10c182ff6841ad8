"""Before training: will this model, on this batch, train at this level?"""

from halfstep.diagnostics.preflight.model_check import check
from halfstep.diagnostics.preflight.report import CheckReport

__all__ = ["CheckReport", "check"]

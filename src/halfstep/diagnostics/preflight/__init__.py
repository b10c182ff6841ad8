"""Checks before training whether a level works for a model, on copies of it."""

from halfstep.diagnostics.preflight.model_check import check
from halfstep.diagnostics.preflight.report import CheckReport

__all__ = ["CheckReport", "check"]

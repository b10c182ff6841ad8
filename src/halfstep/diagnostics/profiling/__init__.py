"""Measures where the time of a training step goes."""

from halfstep.diagnostics.profiling.profile_result import Profile, Row
from halfstep.diagnostics.profiling.profile_step import profile

__all__ = ["Profile", "Row", "profile"]

"""Where the time of a training step goes.

In: a function that makes one step. Out: a `Profile`: seconds by operation, in casts, in
matrix products, outside any operation, in waiting for the device and for data.
"""

from halfstep.diagnostics.profiling.profile_result import Profile, Row
from halfstep.diagnostics.profiling.profile_step import profile

__all__ = ["Profile", "Row", "profile"]

"""A failing step, run again: which operation made the first inf or NaN.

In: a model, and a callable that computes the loss of the failing micro-batch. Out: a
`BadOp`, or None where all is finite. Weights, gradients, buffers and random numbers are
afterwards as they were before.
"""

from __future__ import annotations

from halfstep.diagnostics.replay.search import find_nonfinite, not_reproduced

__all__ = ["find_nonfinite", "not_reproduced"]

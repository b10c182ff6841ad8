"""Replays a failing step to find which operation made the first inf or NaN."""

from halfstep.diagnostics.replay.causes import not_reproduced
from halfstep.diagnostics.replay.search import find_nonfinite

__all__ = ["find_nonfinite", "not_reproduced"]

"""Replays a failing step to find which operation made the first inf or NaN."""

from halfstep.diagnostics.replay.search import first_bad, not_reproduced

__all__ = ["first_bad", "not_reproduced"]

"""Observes a model while it trains: which tensor is not finite, or what all are like.

In: a model. Out: `Probe`, with flags and statistics by name.
"""

from halfstep.diagnostics.probe.probe import MODES, Event, Probe

__all__ = ["MODES", "Event", "Probe"]

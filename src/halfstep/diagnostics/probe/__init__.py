"""Observes a model while it trains: non-finite tensors, or statistics of all."""

from halfstep.diagnostics.probe.probe import MODES, Event, Probe

__all__ = ["MODES", "Event", "Probe"]

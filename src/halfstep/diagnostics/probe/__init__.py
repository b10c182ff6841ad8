"""Records non-finite tensors, or statistics of all tensors, while a model trains."""

from halfstep.diagnostics.probe.probe import MODES, Event, Probe

__all__ = ["MODES", "Event", "Probe"]

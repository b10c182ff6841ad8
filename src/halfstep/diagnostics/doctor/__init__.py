"""The doctor: what is wrong with a run, or will be, and what fixes it."""

from halfstep.diagnostics.doctor.rules import RULES, examination, examine
from halfstep.diagnostics.doctor.run_record import RunFacts

__all__ = ["RULES", "RunFacts", "examination", "examine"]

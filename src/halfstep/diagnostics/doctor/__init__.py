"""The doctor: what is wrong with a run, or will be, and what fixes it.

In: facts about a run. Out: findings.
"""

from halfstep.diagnostics.doctor.rules import RULES, examination, examine
from halfstep.diagnostics.doctor.run_record import RunFacts

__all__ = ["RULES", "RunFacts", "examination", "examine"]

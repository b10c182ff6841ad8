"""The doctor: what is wrong with a run, or will be, and what mends it.

In: facts about a run. Out: findings.
"""

from halfstep.doctor.facts import RunFacts
from halfstep.doctor.rules import RULES, examination, examine

__all__ = ["RULES", "RunFacts", "examination", "examine"]

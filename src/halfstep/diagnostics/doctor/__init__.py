"""Evaluates rules on the facts of a run and reports problems and their fixes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor import (
    rules_learning,
    rules_precision,
    rules_scale,
    rules_speed,
)
from halfstep.diagnostics.doctor.rule import Rule, evaluate
from halfstep.diagnostics.doctor.run_record import RunFacts

if TYPE_CHECKING:
    from halfstep.reporting.finding import Finding

__all__ = ["RULES", "RunFacts", "examination", "examine"]

RULES: tuple[Rule[RunFacts], ...] = (
    *rules_learning.RULES,
    *rules_scale.RULES,
    *rules_precision.RULES,
    *rules_speed.RULES,
)
"""All rules, in the order of the docs."""


examination = partial(evaluate, RULES)


def examine(facts: RunFacts) -> list[Finding]:
    """Return the findings of all rules, worst first.

    Example:
        >>> from halfstep.diagnostics.doctor.run_record import Config, RunFacts
        >>> facts = RunFacts(config=Config(dtype="fp16", loss_scale="none"))
        >>> [(finding.severity, finding.rule) for finding in examine(facts)]
        [('error', 'no loss scale')]
    """
    return list(examination(facts).findings)

"""Evaluates rules on the facts of a run and reports problems and their fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor import rules_precision, rules_scale, rules_speed
from halfstep.diagnostics.doctor.rule import NEEDS, Examination, Rule
from halfstep.diagnostics.doctor.run_record import RunFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from halfstep.reporting.finding import Finding

__all__ = ["RULES", "RunFacts", "examination", "examine", "worst_first"]

RULES: tuple[Rule[RunFacts], ...] = (
    *rules_scale.RULES,
    *rules_precision.RULES,
    *rules_speed.RULES,
)
"""All rules, in the order of the docs."""

_SPEED = frozenset(rule.name for rule in rules_speed.RULES)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings; of one severity, those of speed come last."""
    return tuple(
        sorted(findings, key=lambda one: (one.rank[0], one.rule in _SPEED, one.rank))
    )


def examination(
    facts: RunFacts, hints: Mapping[str, str] | None = None, no_speed: str = ""
) -> Examination:
    """Evaluate the rules that apply to a run.

    Args:
        facts: The facts of the run.
        hints: Missing fact -> the reason to report. Rules that need another missing
            fact are left out. None: all reasons in `NEEDS`, for the folder of a run.
        no_speed: Why the rules of speed are not evaluated; "" if they are.
    """
    if hints is None:
        hints = {name: why for name, (_, why) in NEEDS.items()}
    findings: list[Finding] = []
    reasons: dict[str, list[str]] = {}
    num_evaluated = 0
    for rule in (each for each in RULES if each.concerns(facts)):
        if no_speed and rule.name in _SPEED:
            reasons.setdefault(no_speed, []).append(rule.name)
            continue
        missing = next((name for name in rule.needs if not NEEDS[name][0](facts)), None)
        if missing is None:
            num_evaluated += 1
            findings += rule.evaluate(facts)
        elif missing in hints:
            reasons.setdefault(hints[missing], []).append(rule.name)
    return Examination(worst_first(findings), reasons, num_evaluated)


def examine(facts: RunFacts) -> list[Finding]:
    """Return the findings of all rules, worst first.

    Example:
        >>> from halfstep.diagnostics.doctor.run_record import Config, RunFacts
        >>> facts = RunFacts(config=Config(dtype="fp16", loss_scale="none"))
        >>> [(finding.severity, finding.rule) for finding in examine(facts)]
        [('error', 'no loss scale')]
    """
    return list(examination(facts).findings)

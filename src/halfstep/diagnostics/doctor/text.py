"""Formats the findings of a run as text for a terminal and as data for JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from halfstep.reporting.finding import SEVERITIES
from halfstep.reporting.table import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.diagnostics.doctor.rule import Examination
    from halfstep.diagnostics.doctor.run_record import RunFacts

WIDTH = 80
_LABEL = 12  # columns of a field's name with the blanks around it
_FIELDS = ("where", "measured", "limit", "source", "advice")


def lead(facts: RunFacts, examination: Examination) -> str:
    """Return a sentence with the run's settings and its number of findings."""
    config = facts.config
    words = [config.level, facts.dtype, f"on {facts.device}" if facts.device else None]
    what = " ".join(word for word in words if word) or "level and format not known"
    count = len(facts.steps)
    steps = f", {count:,} step{'s' * (count != 1)}"
    if not count:  # diagnose has a profile and no records
        steps = "" if facts.profile is not None else ", no records of steps"
    return f"{what}{steps}: {counted(examination)}."


def counted(examination: Examination) -> str:
    """Return the number of findings of each severity, in words."""
    counts = Counter(finding.severity for finding in examination.findings)
    present = ((counts[word], word) for word in SEVERITIES if counts[word])
    parts = [f"{count} {word}{'s' * (count != 1)}" for count, word in present]
    rules = f"{examination.num_evaluated} evaluated rules"
    return ", ".join(parts) or f"nothing found by the {rules}"


def text(facts: RunFacts, examination: Examination, width: int = WIDTH) -> str:
    """Return the report, findings worst first, wrapped to `width` columns."""
    parts = [wrap(f"{facts.name}: {lead(facts, examination)}", width)]
    for finding in examination.findings:
        lines = [*wrap(f"{finding.severity.upper()}  {finding.rule}", width)]
        values = ((name, getattr(finding, name)) for name in _FIELDS)
        for name, value in values:
            if value:
                lines += _hung(f"  {name:<{_LABEL - 2}}", value, width)
        parts.append(lines)
    missing = examination.not_evaluated
    points = [f"{why}: {', '.join(rules)}" for why, rules in missing.items()]
    lines = [line for each in points for line in _hung("  - ", each, width)]
    parts += [["Not checked:", *lines]] if points else []
    return "\n\n".join("\n".join(lines) for lines in parts)


def _hung(label: str, value: str, width: int) -> Iterator[str]:
    """Yield the lines of a label and its wrapped text, with a hanging indent."""
    for number, part in enumerate(wrap(value, width - len(label))):
        yield (label if number == 0 else " " * len(label)) + part


def data(facts: RunFacts, examination: Examination) -> dict[str, Any]:
    """Return plain values for `json.dumps`."""
    return {
        "run": facts.name,
        "findings": [finding.data() for finding in examination.findings],
        "looked_at": examination.num_evaluated,
        "not_looked_at": [
            {"why": why, "rules": list(rules)}
            for why, rules in examination.not_evaluated.items()
        ],
    }

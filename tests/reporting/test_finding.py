"""Findings: they sort worst first, print as sentences and survive JSON."""

import pytest

from halfstep.errors import UserError
from halfstep.reporting.finding import SEVERITIES, Finding


def finding(severity: str = "warning", weight: float = 0.5) -> Finding:
    return Finding(
        severity=severity,
        rule="underflow",
        where="encoder.0.fc.weight:grad",
        measured="7 % of its gradients become 0 in fp16",
        limit="5 %",
        source="our choice",
        advice="Raise the loss scale to 4096.",
        weight=weight,
    )


def test_worst_comes_first() -> None:
    """Law: severity decides, then weight."""
    pairs = [(word, weight) for word in SEVERITIES for weight in (0.9, 0.1)]
    findings = [finding(*pair) for pair in reversed(pairs)]
    findings.sort(key=lambda found: found.rank)
    assert [(found.severity, found.weight) for found in findings] == pairs


def test_an_unknown_severity_is_refused() -> None:
    """A rule's slip must not hide what it found at the end of the list."""
    with pytest.raises(UserError, match=r"'fatal' of rule 'underflow': use error, w"):
        finding("fatal")

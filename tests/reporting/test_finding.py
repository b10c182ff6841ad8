"""Findings sort worst first."""

from halfstep.reporting.finding import SEVERITIES, Finding, Severity


def finding(severity: Severity = "warning", weight: float = 0.5) -> Finding:
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

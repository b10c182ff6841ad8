"""One result of a rule: what was measured, the limit, and the fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from halfstep.reporting.table import Report, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first: training fails or is wrong; it is slower or worse than necessary; it may
become so."""


@dataclass(frozen=True, repr=False)
class Finding(Report):
    """The result of a rule: what was measured, the limit, and the fix."""

    severity: Severity
    """One of `SEVERITIES`."""
    rule: str
    """Short name of the rule, such as "underflow"; it does not change."""
    where: str
    """Module path, parameter, operation or part of the run."""
    measured: str
    """What was measured there, with its unit."""
    limit: str
    """The limit it was compared with; empty if the rule has no number."""
    source: str
    """Origin of the limit: a format's definition, a paper, or "our choice"."""
    advice: str
    """The flag, policy rule or code change that fixes it."""
    weight: float = 0.0
    """Orders findings of one severity, largest first: a share of the time or of the
    numbers that it concerns, 0 to 1."""

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key, worst first."""
        return SEVERITIES.index(self.severity), -self.weight

    def __str__(self) -> str:
        """Return it as sentences."""
        against = f" ({self.limit})" if self.limit else ""
        return f"{self.where}: {self.measured}{against}. {self.advice}".rstrip()

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)


def findings_table(findings: Iterable[Finding]) -> Table:
    """Return findings as a table."""
    columns = ("severity", "rule", "where", "measured", "limit", "advice")
    rows = tuple(tuple(getattr(one, name) for name in columns) for one in findings)
    return Table("Findings", columns, rows)

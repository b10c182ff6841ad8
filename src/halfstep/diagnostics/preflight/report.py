"""Defines the report of a check before training: text, tables and plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from halfstep.diagnostics.preflight.measurements import worst_first
from halfstep.diagnostics.preflight.rules import is_good, power, speed_up_interval
from halfstep.reporting import json_fields
from halfstep.reporting.finding import findings_table
from halfstep.reporting.table import Cell, Report, Table

if TYPE_CHECKING:
    from halfstep.diagnostics.preflight.measurements import Facts
    from halfstep.reporting.finding import Finding

_MAX_TABLE_ROWS = 12  # rows of a table by layer; `data` has all
_MAX_FINDINGS = 3  # findings in the printed report


@dataclass(frozen=True, repr=False)
class CheckReport(Report):
    """The result of `halfstep.check`; prints as verdict and worst findings."""

    verdict: str
    """The most important result: "fails: WHERE: WHAT", "keep these modules in float32:
    RULES", "good with a loss scale of X", "not worth it: COST", "good" or "nothing to
    compare: REASON". After a semicolon may follow what else matters, such as "cannot
    tell whether it is worth it: COST"."""
    findings: tuple[Finding, ...]
    """All findings, worst first."""
    facts: Facts
    """All measurements."""

    @property
    def good(self) -> bool:
        """Whether training can begin as asked, with the loss scale in the verdict."""
        return is_good(self.facts, self.findings)

    def __str__(self) -> str:
        """Return the verdict and the worst findings, a line each."""
        lines = [str(finding) for finding in self.findings[:_MAX_FINDINGS]]
        more = len(self.findings) - len(lines)
        if more:
            lines.append(f"and {more} more: report.findings")
        return "\n".join([f"{self.facts.words}: {self.verdict}", *lines])

    def tables(self) -> tuple[Table, ...]:
        """Return the verdict, gradients by layer, loss scales and costs."""
        facts = self.facts
        tables = [_summary(self), _layers(facts), _scales(facts), _costs(facts)]
        tables.append(findings_table(self.findings))
        return tuple(table for table in tables if table.rows)

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`.

        Non-finite numbers become "inf", "-inf" and "nan", as in `Table.data`.
        """
        derived = ("speed_up", "memory_saved", "loss_error")
        more = {name: getattr(self.facts, name) for name in derived}
        report = {
            "verdict": self.verdict,
            "findings": [finding.data() for finding in self.findings],
            "facts": asdict(self.facts) | more,
        }
        plain: dict[str, Any] = json_fields.plain(report)
        return plain


def _summary(report: CheckReport) -> Table:
    facts = report.facts
    rows: list[tuple[Cell, ...]] = [
        ("verdict", report.verdict),
        ("level", f"{facts.words} on {facts.device}: {facts.reason}"),
        ("loss in fp32", f"{facts.loss_fp32:.6g}"),
    ]
    error = facts.loss_error
    if facts.loss is not None and error is not None:
        rows.append(("loss", f"{facts.loss:.6g} ({error:+.3%})"))
    similarity, noise = facts.gradients, facts.noise
    if similarity is not None:
        text = f"cosine {similarity.cosine:.6f}, SQNR {similarity.sqnr:.1f} dB, "
        text += f"{similarity.flushed:.2%} lost"
        rows.append(("gradients against fp32", text))
    if noise is not None:
        rows.append((facts.noise_of, f"cosine {noise.cosine:.6f}, in fp32"))
    if facts.safe_scale is not None:
        rows.append(("largest safe loss scale", power(facts.safe_scale)))
    if facts.curve:
        first = facts.curve[0]
        lost = f"{first.flushed:.2%} of fp32's gradients become zero"
        rows.append((f"at loss scale {power(first.scale)}", lost))
    if facts.speed_up is not None:
        low, high = speed_up_interval(facts.ratios)
        times = f"{facts.speed_up:.2f} times that of fp32, between {low:.2f} and "
        rows.append(("speed", f"{times}{high:.2f} in {len(facts.ratios)} rounds"))
    if facts.memory_saved is not None:
        rows.append(("memory", f"{1 - facts.memory_saved:.0%} of that of fp32"))
    if facts.lost is not None:
        lost = f"{facts.lost:.0%} of one step, {facts.optimizer}"
        rows.append(("updates rounded away", lost))
    notes = [f"The check took {facts.seconds:.1f} s."]
    if facts.dropout_off:
        notes.append(
            "Dropout layers let everything through: a GPU draws other masks in another "
            "format, and gradients would differ by those."
        )
    return Table("Check before training", ("what", "value"), tuple(rows), tuple(notes))


def _layers(facts: Facts) -> Table:
    noise = {one.where: one.cosine for one in facts.noise_layers}
    worst = worst_first(facts.layers)
    total_norm = facts.gradients.norm if facts.gradients is not None else 0.0
    rows = tuple(
        (
            one.where,
            one.numbers,
            one.cosine,
            f"{one.sqnr:.1f}",
            f"{one.flushed:.2%}",
            noise.get(one.where),
            f"{one.norm / total_norm:.1%}" if total_norm else None,
        )
        for one in worst[:_MAX_TABLE_ROWS]
    )
    columns = ("module", "numbers", "cosine", "SQNR dB", "lost", "noise", "of the norm")
    left = (f"The {_MAX_TABLE_ROWS} worst of {len(worst)}.",)
    notes = left * (len(worst) > _MAX_TABLE_ROWS)
    notes += (f"noise: cosine of {facts.noise_of}, in fp32",)
    return Table("Gradients against fp32, by module", columns, rows, notes, digits=5)


def _scales(facts: Facts) -> Table:
    rows = tuple(
        (
            power(point.scale),
            f"{point.flushed:.2%}",
            f"{point.subnormal:.2%}",
            point.headroom,
        )
        for point in sorted(facts.curve, key=lambda point: point.scale)
    )
    columns = ("loss scale", "become zero", "lose bits", "headroom, binades")
    note = f"What {facts.dtype} would make of the gradients that fp32 has."
    return Table("Loss scales", columns, rows, (note,), digits=0)


def _costs(facts: Facts) -> Table:
    pairs = [("fp32", facts.cost_fp32), (facts.words, facts.cost)]
    rows: list[tuple[Cell, ...]] = []
    for name, cost in pairs:
        if cost is not None:
            sizes = (*cost.memory.values(), cost.bytes)
            rows.append((name, cost.seconds * 1e3, *(size / 1e6 for size in sizes)))
    names = list(facts.cost_fp32.memory) if facts.cost_fp32 is not None else []
    columns = ("level", "ms a step", *(f"{name} MB" for name in names), "all MB")
    return Table("Time and memory", columns, tuple(rows), digits=1)

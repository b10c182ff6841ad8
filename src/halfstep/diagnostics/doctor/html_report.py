"""Renders the doctor's HTML page: findings, exponents, skipped steps and profile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.text import lead, not_evaluated_lines
from halfstep.numerics import formats
from halfstep.numerics.tensor_summary import max_exponent, merged, underflow_exponent
from halfstep.reporting import html
from halfstep.reporting.html import Bar, Card, Drawing, Heatmap, Section
from halfstep.reporting.table import Table
from halfstep.scaling.step_report import first_names

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from halfstep.diagnostics.doctor.rule import Examination
    from halfstep.diagnostics.doctor.run_record import RunFacts, Step
    from halfstep.diagnostics.profiling import Profile
    from halfstep.reporting.finding import Finding

_MOST_ROWS = 40  # tensors in one picture
_MOST_OPERATIONS = 15
_MOST_SKIPS = 20
_OTHERS = "other operations"
_ABOUT_PARTS = (
    "Other operations are all the rest of the table, such as norms, activations, "
    "dropout, additions and copies."
)
_EXPONENTS = (
    "How large the numbers were: the darker, the more of a tensor's numbers lie "
    "between that power of two and the next. Zeros, inf and NaN are not drawn."
)


def page(facts: RunFacts, examination: Examination) -> str:
    """Return an HTML document; raise UserError without jinja2 or matplotlib."""
    healthy = "" if examination.findings else "No problem found."
    drawings = _exponents_by_layer(facts)
    sections = [
        Section("Findings", healthy, cards=cards(examination.findings)),
        Section("Exponents by layer", _EXPONENTS * bool(drawings), drawings=drawings),
        skips(facts.steps),
        _profile(facts.profile),
        Section("Not checked", points=tuple(not_evaluated_lines(examination))),
        Section("Could not be read", points=facts.problems),
    ]
    nonempty = [each for each in sections if each != Section(each.heading)]
    return html.page(
        f"halfstep doctor: {facts.name}", nonempty, lead(facts, examination)
    )


def cards(findings: Iterable[Finding]) -> tuple[Card, ...]:
    """Return the findings as cards of a page."""

    def card(each: Finding) -> Card:
        against = ("limit", f"{each.limit} ({each.source})")
        against = against if each.limit else ("source", each.source)
        fields = (("measured", each.measured), against, ("advice", each.advice))
        return Card(each.severity, f"{each.rule}: {each.where}", fields)

    return tuple(map(card, findings))


def _borders(
    facts: RunFacts, histograms: Sequence[Counter[int]]
) -> tuple[tuple[int, str], ...]:
    """Return the range limits of fp16, and those of the run's format if reached."""
    powers = [power for histogram in histograms for power in histogram]
    borders = []
    for name in dict.fromkeys(("fp16", facts.dtype or "fp16")):
        format_ = formats.FORMATS.get(name)
        if format_ is None:
            continue
        zero, full = underflow_exponent(format_), max_exponent(format_) + 1
        if name == "fp16" or min(powers) <= zero:
            borders.append((zero, f"{name}: 0 below"))
        if name == "fp16" or max(powers) + 1 >= full:
            borders.append((full, f"{name}: inf above"))
    return tuple(borders)


def _exponents_by_layer(facts: RunFacts) -> tuple[Drawing, ...]:
    """Return one drawing of outputs and one of gradients, each over all samples."""
    kinds = (
        (":output", "Outputs", "", 1.0),
        (":grad", "Gradients", f"at loss scale {facts.scale:g}", facts.scale),
    )
    drawings = []
    for ending, title, how, scale in kinds:
        histograms = [
            (name.removesuffix(ending), merged(samples, scale))
            for name, samples in facts.stats.items()
            if name.endswith(ending)
        ]
        rows = [(name, histogram) for name, histogram in histograms if histogram]
        if not rows:
            continue
        extremes = _extremes(rows)
        rest = len(rows) - len(extremes)
        note = f"{rest} more, less large and less small, are left out."
        borders = _borders(facts, [histogram for _, histogram in extremes])
        caption = f"{title}, {how}" if how else title
        svg = Heatmap(caption, tuple(extremes), borders).svg()
        drawings.append(Drawing(caption, svg, (note,) * bool(rest)))
    return tuple(drawings)


def _extremes(rows: list[tuple[str, Counter[int]]]) -> list[tuple[str, Counter[int]]]:
    """Return the rows with the largest and the smallest values, in original order."""
    if len(rows) <= _MOST_ROWS:
        return rows
    half = _MOST_ROWS // 2
    by_top = sorted(range(len(rows)), key=lambda i: -max(rows[i][1]))[:half]
    rest = [i for i in range(len(rows)) if i not in set(by_top)]
    by_low = sorted(rest, key=lambda i: min(rows[i][1]))[:half]
    return [rows[i] for i in sorted(by_top + by_low)]


def skips(steps: Sequence[Step]) -> Section:
    """Return the section on skipped steps."""
    skipped = [step for step in steps if step.skipped]
    if not skipped:
        return Section("Skipped steps", "No step was skipped." if steps else "")
    rows = tuple(
        (
            str(step.step),
            f"{step.scale:g}" if step.scale else "-",
            first_names(step.found_inf_in) or "-",
        )
        for step in skipped[:_MOST_SKIPS]
    )
    rest = len(skipped) - len(rows)
    more = "more step was" if rest == 1 else "more steps were"
    notes = (f"{rest:,} {more} skipped.",) if rest else ()
    columns = ("step", "loss scale", "gradients that were not finite")
    return Section("Skipped steps", tables=(Table("", columns, rows, notes),))


def _profile(profile: Profile | None) -> Section:
    heading = "Where the time of a step goes"
    if profile is None or not profile.wall_s:
        return Section(heading)
    parts = profile.parts()
    others = max(0.0, profile.wall_s - sum(parts.values()))
    nonzero = {n: size for n, size in (parts | {_OTHERS: others}).items() if size}
    table = profile.table(_MOST_OPERATIONS)
    table = replace(table, title="", notes=(*table.notes, _ABOUT_PARTS))
    return Section(heading, bars=(Bar(tuple(nonzero.items())),), tables=(table,))

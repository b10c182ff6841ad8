"""The doctor's page: findings, exponents, scale and profile, in one file of HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.text import lead, not_evaluated_lines
from halfstep.numerics import formats
from halfstep.numerics.tensor_summary import max_exponent, merged, underflow_exponent
from halfstep.reporting import html
from halfstep.reporting.html import Bar, Card, Chart, Curve, Drawing, Heatmap, Section
from halfstep.reporting.table import Table, single_line

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.diagnostics.doctor.rule import Examination
    from halfstep.diagnostics.doctor.run_record import RunFacts, Step
    from halfstep.diagnostics.profiling import Row
    from halfstep.numerics.tensor_summary import Sample
    from halfstep.reporting.finding import Finding

_MOST_ROWS = 40  # tensors in one picture
_MAX_COLUMNS = 64  # of a picture over steps: more cannot be told apart
_MAX_HISTORIES = 6  # tensors shown over steps
_MOST_OPERATIONS = 15
_MOST_SKIPS = 10
_MOST_NAMES = 3
_OTHERS = "other operations"
_ABOUT_PARTS = (
    "Matrix products, casts, fp32 operations and the optimizer are apart; other "
    "operations are all the rest of the table, such as norms, activations, dropout, "
    "additions and copies."
)
_EXPONENTS = (
    "How large the numbers were: the darker, the more of a tensor's numbers lie "
    "between that power of two and the next. Zeros, inf and NaN are not drawn."
)


def page(facts: RunFacts, examination: Examination) -> str:
    """Return the page, an HTML document.

    Raises:
        UserError: If jinja2 or matplotlib is not installed.
    """
    healthy = "" if examination.findings else "No problem found."
    silent = not_evaluated_lines(examination)
    sections = [
        Section("Findings", healthy, cards=cards(examination.findings)),
        _losses(facts),
        Section("Exponents by layer", _EXPONENTS, drawings=_exponents_by_layer(facts)),
        Section(
            "Exponents over steps",
            drawings=_exponent_history(facts, examination.findings),
        ),
        _scale(facts.steps),
        _profile(facts),
        Section("Not checked", points=tuple(silent)),
        Section("Could not be read", points=facts.problems),
    ]
    empty = {Section(each.heading) for each in sections}
    empty.add(Section("Exponents by layer", _EXPONENTS))
    nonempty = [section for section in sections if section not in empty]
    title = single_line(f"halfstep doctor: {facts.name}")
    return html.page(title, nonempty, lead(facts, examination))


def cards(findings: Iterable[Finding]) -> tuple[Card, ...]:
    """Return findings as a page shows them."""
    return tuple(map(_card, findings))


def _card(finding: Finding) -> Card:
    against = (("limit", f"{finding.limit} ({finding.source})"),)
    if not finding.limit:
        against = (("source", finding.source),)
    fields = (("measured", finding.measured), *against, ("advice", finding.advice))
    lines = tuple((name, single_line(words)) for name, words in fields)
    return Card(
        finding.severity, single_line(f"{finding.rule}: {finding.where}"), lines
    )


def _borders(
    facts: RunFacts, histograms: Sequence[Counter[int]]
) -> tuple[tuple[int, str], ...]:
    """Return the borders of fp16, and of the run's own format if they are near."""
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
    """Return a picture of outputs and one of gradients, each over all samples."""
    kinds = (
        (":output", "Outputs", "", 1.0),
        (":grad", "Gradients", f"at loss scale {facts.scale:g}", facts.scale),
    )
    drawings = []
    for ending, title, how, scale in kinds:
        histograms = [
            (single_line(name.removesuffix(ending)), merged(samples, scale))
            for name, samples in facts.stats.items()
            if name.endswith(ending)
        ]
        rows = [(name, histogram) for name, histogram in histograms if histogram]
        if not rows:
            continue
        extremes = _extremes(rows)
        notes = []
        if len(extremes) < len(rows):
            rest = len(rows) - len(extremes)
            notes.append(f"{rest} more, less large and less small, are left out.")
        borders = _borders(facts, [histogram for _, histogram in extremes])
        caption = f"{title}, {how}" if how else title
        svg = Heatmap(caption, tuple(extremes), borders).svg()
        drawings.append(Drawing(caption, svg, tuple(notes)))
    return tuple(drawings)


def _extremes(rows: list[tuple[str, Counter[int]]]) -> list[tuple[str, Counter[int]]]:
    """Return the rows with the largest and the smallest numbers, in their order."""
    if len(rows) <= _MOST_ROWS:
        return rows
    half = _MOST_ROWS // 2
    by_top = sorted(range(len(rows)), key=lambda i: -max(rows[i][1]))[:half]
    rest = [i for i in range(len(rows)) if i not in set(by_top)]
    by_low = sorted(rest, key=lambda i: min(rows[i][1]))[:half]
    return [rows[i] for i in sorted(by_top + by_low)]


def _exponent_history(
    facts: RunFacts, findings: Sequence[Finding]
) -> tuple[Drawing, ...]:
    """Return pictures over steps: of tensors in findings first, then of extremes."""
    many = {
        name: samples
        for name, samples in facts.stats.items()
        if len(samples) > 1 and any(each.summary.exponents for each in samples)
    }
    tops = sorted(many, key=lambda name: -_top(many[name]))
    lows = sorted(many, key=lambda name: _low(many[name]))
    mixed = [name for pair in zip(tops, lows, strict=True) for name in pair]
    named = [finding.where for finding in findings if finding.where in many]
    drawings = []
    for name in list(dict.fromkeys([*named, *mixed]))[:_MAX_HISTORIES]:
        scale = facts.scale if name.endswith(":grad") else 1.0
        stride = math.ceil(len(many[name]) / _MAX_COLUMNS)
        histograms = [
            (f"step {sample.step:,}", merged([sample], scale))
            for sample in many[name][::stride]
        ]
        borders = _borders(facts, [h for _, h in histograms if h])
        words = single_line(name)
        picture = Heatmap(words, tuple(histograms), borders, over_steps=True)
        drawings.append(Drawing(words, picture.svg()))
    return tuple(drawings)


def _top(samples: Sequence[Sample]) -> int:
    return max(max(each.summary.exponents, default=-9999) for each in samples)


def _low(samples: Sequence[Sample]) -> int:
    return min(min(each.summary.exponents, default=9999) for each in samples)


def _curve(
    steps: Sequence[Step], name: str, value: Callable[[Step], float | None]
) -> Curve:
    pairs = [(step.step, value(step)) for step in steps]
    points = [(x, y) for x, y in pairs if y is not None]
    xs, ys = (tuple(float(pair[i]) for pair in points) for i in (0, 1))
    return Curve(name, xs, ys)


def _losses(facts: RunFacts) -> Section:
    """Return how the loss went, of training and on dev."""
    evaluations = [one for one in facts.evaluations if one.loss is not None]
    xs = tuple(float(one.step) for one in evaluations)
    ys = tuple(one.loss or 0.0 for one in evaluations)
    curves = (
        _curve(facts.steps, "training", lambda step: step.loss),
        Curve("dev", xs, ys),
    )
    has_values = any(math.isfinite(y) for curve in curves for y in curve.y)
    chart = Chart("Loss", "step", "loss", tuple(curve for curve in curves if curve.x))
    return Section("Loss", charts=(chart,) if has_values else ())


def _scale(steps: Sequence[Step]) -> Section:
    """Return how the scale moved, how skips added up, and which steps they were."""
    count, sums = 0, {}
    for step in steps:
        count += bool(step.skipped)
        sums[step.step] = count if step.skipped is not None else None
    curves = (
        ("Loss scale", "scale", _curve(steps, "", lambda s: s.scale), True),
        ("Skipped steps so far", "steps", _curve(steps, "", _of(sums)), False),
        ("Gradient norm", "norm", _curve(steps, "", lambda s: s.grad_norm), True),
    )
    charts = tuple(
        Chart(title, "step", unit, (curve,), log_y=log, step=not log or unit == "scale")
        for title, unit, curve, log in curves
        if any(math.isfinite(y) and (y > 0 or not log) for y in curve.y)
    )
    skipped = [step for step in steps if step.skipped]
    rows = tuple(
        (
            str(step.step),
            f"{step.scale:g}" if step.scale else "-",
            ", ".join(step.found_inf_in[:_MOST_NAMES]) or "-",
        )
        for step in skipped[:_MOST_SKIPS]
    )
    rest = len(skipped) - len(rows)
    more = "more step was" if rest == 1 else "more steps were"
    notes = (f"{rest:,} {more} skipped.",) if rest else ()
    columns = ("step", "loss scale", "gradients that were not finite")
    table = Table("Skipped steps", columns, rows, notes)
    heading = "Loss scale and skipped steps"
    return Section(heading, charts=charts, tables=(table,) if rows else ())


def _of(sums: dict[int, int | None]) -> Callable[[Step], float | None]:
    return lambda step: sums[step.step]


def _profile(facts: RunFacts) -> Section:
    """Return the parts of a step, and the operations that took the longest."""
    profile, heading = facts.profile, "Where the time of a step goes"
    if profile is None or not profile.wall_s:
        return Section(heading)
    parts = {
        "matrix products": profile.gemm_s,
        "casts": profile.casts_s,
        "fp32 operations": profile.fp32_only_s,
        "optimizer": profile.update_s,
        "Python, launches": profile.python_s,
        "input": profile.input_s,
    }
    others = max(0.0, profile.wall_s - sum(parts.values()))
    named = (*parts.items(), (_OTHERS, others))
    nonzero = tuple((name, size) for name, size in named if size)
    order = sorted(profile.rows, key=lambda row: -row.self_s)[:_MOST_OPERATIONS]
    rows = tuple(
        (
            row.name,
            1000 * row.self_s,
            100 * row.self_s / profile.wall_s,
            row.calls,
            _shapes(row),
            ", ".join(row.dtypes) or "-",
        )
        for row in order
    )
    columns = ("operation", "ms a step", "share, %", "calls", "shapes", "formats")
    waits = f"The host waited {profile.waits:g} times a step, "
    shows_waits = (
        profile.waits and facts.device != "cpu"
    )  # a CPU has nothing to wait for
    notes = (f"{waits}{1000 * profile.wait_s:.3g} ms.",) if shows_waits else ()
    title = f"Operations that took the longest, of {1000 * profile.wall_s:.3g} ms"
    table = Table(title, columns, rows, (*notes, _ABOUT_PARTS), digits=1)
    return Section(heading, bars=(Bar("", nonzero),), tables=(table,) if rows else ())


def _shapes(row: Row) -> str:
    return ", ".join(" x ".join(map(str, shape)) or "()" for shape in row.shapes) or "-"

"""Renders the report of a training run as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.machine import hardware
from halfstep.reporting import html
from halfstep.reporting.finding import findings_table
from halfstep.reporting.html import Chart, ConfusionMatrix, Curve, Section
from halfstep.reporting.table import Cell, Table
from halfstep.scaling.step_report import first_names
from halfstep.train.metrics import EvalMetrics, score_title, score_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from halfstep.reporting.finding import Finding
    from halfstep.train.baseline import Baseline

_PARTS = ("input", "forward", "backward", "update", "rest")
_WARM_UP = 10  # steps that also allocate, compile and fill caches
_MOST_SKIPS = 20
_SMOOTH_PARTS = 40  # stretches of a noisy curve that are averaged
_LOSS, _SCORE = "dev_loss", "dev_"
_CHART_OF_LOSS = "Loss"
_OF_LOSS = (
    "The training loss includes class weights, label smoothing, dropout and masked "
    "tokens as configured; the dev loss is computed without them."
)
_OF_HOST = (
    "Times are taken on the host: the GPU works on after the part that launched the "
    "work, and the next part that synchronizes is charged for it."
)


@dataclass(frozen=True)
class ReportData:
    """The content of a report."""

    title: str
    lead: str
    settings: Mapping[str, object]
    chosen: frozenset[str]
    metrics: Mapping[str, EvalMetrics]
    """By split; the last one is the final result."""
    worst_examples: Table
    loss_unit: str
    against_fp32: Table | None
    """Time and memory of a step, in fp32 and at the level."""
    precision: Table
    records: Sequence[Mapping[str, Any]]
    """Steps and evaluations, as in metrics.jsonl."""
    summary: Mapping[str, Any]
    """As in summary.json; rows of missing keys are left out."""
    data_findings: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    """Those of the doctor."""
    baseline: Baseline | None = None
    """A simple model's scores on the last split."""

    @property
    def final(self) -> tuple[str, EvalMetrics]:
        """The last split and its metrics: the final result."""
        return list(self.metrics.items())[-1]


def page(report: ReportData) -> str:
    """Return the report, an HTML document."""
    steps = [record for record in report.records if "event" not in record]
    evals = [record for record in report.records if record.get("event") == "eval"]
    charts = _charts(steps, evals, report.loss_unit)
    on_gpu = report.settings.get("device") == "cuda"
    about = _OF_LOSS if any(chart.title == _CHART_OF_LOSS for chart in charts) else ""
    worst = report.worst_examples
    own = _cost(report.summary), _memory(report.summary, on_gpu=on_gpu)
    cost = (report.against_fp32, *(table for table in own if table.rows))
    found = replace(findings_table(report.findings), title="")
    split, final = report.final
    grids: tuple[ConfusionMatrix, ...] = ()
    if final.confusion is not None:
        confusion = replace(final.confusion, title=f"On {split}")
        grids = (ConfusionMatrix(confusion, "predicted"),)
    sections = [
        Section(
            "Findings",
            points=report.data_findings,
            tables=(found,) if found.rows else (),
        ),
        Section("Quality", tables=_quality(report)),
        Section("Confusion", confusion_matrices=grids),
        Section("Worst mistakes", tables=(worst,) if worst.rows else ()),
        Section("Curves", about, charts=charts),
        _time(steps, on_gpu=on_gpu),
        Section("Cost", tables=tuple(filter(None, cost))),
        _skipped(steps),
        Section("Precision", tables=(replace(report.precision, title=""),)),
        Section("Configuration", tables=(_settings(report.settings, report.chosen),)),
        Section("Machine", tables=(replace(hardware.machine_table(), title=""),)),
    ]
    non_empty = [section for section in sections if section != Section(section.heading)]
    return html.page(report.title, non_empty, report.lead, _headline(report))


def _skipped(steps: Sequence[Mapping[str, Any]]) -> Section:
    heading, skipped = "Skipped steps", [each for each in steps if each.get("skipped")]
    if not skipped:
        return Section(heading, "No step was skipped." if steps else "")
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (step["step"], f"{step['scale']:g}", first_names(step["found_inf_in"]) or "-")
        for step in skipped[:_MOST_SKIPS]
    )
    rest = len(skipped) - len(rows)
    notes = (f"Skipped besides these: {rest:,}.",) if rest else ()
    columns = ("step", "loss scale", "gradients that were not finite")
    return Section(heading, tables=(Table("", columns, rows, notes),))


def _headline(report: ReportData) -> list[tuple[str, str, str]]:
    """Return the main results; those that the summary lacks are left out."""
    summary, score = report.summary, report.summary.get("best_by")
    tiles: list[tuple[str, str, str]] = []
    if score is not None:
        split, final = report.final
        scores = {**final.scores, "loss": final.loss}
        note = f"loss {final.loss:.4f}" if score != "loss" else ""
        value = score_value(score, scores[score])
        if report.baseline is not None and score in report.baseline.scores:
            baseline = score_value(score, report.baseline.scores[score])
            note = f"baseline {baseline}"
        tiles.append((f"{score_title(score)} on {split}", value, note))
    if "ms" in summary.get("fp32", {}):
        facts = summary["fp32"]
        fp32_ms, ms = (facts["ms"][key] for key in ("fp32", "level"))
        fp32_mib, mib = (facts["bytes"][key] / 2**20 for key in ("fp32", "level"))
        times = f"{ms:.1f} ms against {fp32_ms:.1f} ms"
        sizes = f"{mib:.0f} MiB against {fp32_mib:.0f} MiB"
        tiles += [
            ("time of a step", f"{facts['time_ratio']:.2f} x fp32", times),
            ("state and activations", f"{mib / fp32_mib:.2f} x fp32", sizes),
        ]
    elif summary.get("examples_per_s"):
        tiles.append(("speed", f"{summary['examples_per_s']:.0f} texts/s", ""))
    if "level" in summary:
        steps = f"{summary['applied']} steps, {summary['skipped']} skipped"
        tiles.append(("level", f"{summary['level']} {summary['dtype']}", steps))
    return tiles


def _quality(report: ReportData) -> tuple[Table, ...]:
    """Return the scores of every split, then the per-label metrics of the last one."""
    split, final = report.final
    columns = {name: _scores(one) for name, one in report.metrics.items()}
    names = [*columns[split]]
    notes: tuple[str, ...] = ()
    if report.baseline is not None:
        columns[f"baseline on {split}"] = dict(report.baseline.scores)
        notes = (f"The baseline is the {report.baseline.name}.",)
    rows: list[tuple[Cell, ...]] = [
        (score_title(name), *(column.get(name) for column in columns.values()))
        for name in names
    ]
    scores = Table("Scores", ("score", *columns), tuple(rows), notes, digits=4)
    if not final.per_class:
        return (scores,)
    return scores, replace(final.table(f"By label, on {split}"), notes=())


def _scores(metrics: EvalMetrics) -> dict[str, float]:
    """Return scores and loss by name, weighted F1 after macro F1."""
    scores = {}
    for name, value in metrics.scores.items():
        scores[name] = value
        if name == "macro_f1":
            scores["weighted_f1"] = metrics.weighted()[2]
    return {**scores, "loss": metrics.loss}


def _charts(
    steps: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
    loss_unit: str,
) -> tuple[Chart, ...]:
    """Return the curves with two finite values, and the loss scale if it changed.

    One evaluation makes no curve: its scores are in a table.
    """

    def curve(
        name: str,
        records: Iterable[Mapping[str, Any]],
        key: str,
        *,
        smooth: bool = False,
    ) -> Curve:
        x, y = [], []
        for record in records:
            if key in record:
                x.append(float(record["step"]))
                # Non-finite values are null in JSON; they become gaps.
                y.append(float("nan" if record[key] is None else record[key]))
        mean_over = len(x) // _SMOOTH_PARTS if smooth else 1
        return Curve(name, tuple(x), tuple(y), mean_over)

    seen = dict.fromkeys(key for record in evals for key in record)
    keys = [key for key in seen if key.startswith(_SCORE) and key != _LOSS]
    scores = tuple(curve(score_title(k.removeprefix(_SCORE)), evals, k) for k in keys)
    training = curve("training", steps, "loss", smooth=True)
    loss = (training, curve("dev", evals, _LOSS))
    rate, scale = curve("", steps, "lr"), curve("", steps, "scale")
    speed = curve("", steps, "examples_per_s", smooth=True)
    norm = curve("", steps, "grad_norm", smooth=True)
    charts = (
        Chart(_CHART_OF_LOSS, "step", loss_unit, loss),
        Chart("Scores on dev", "step", "score", scores),
        Chart("Learning rate", "step", "rate", (rate,)),
        Chart("Loss scale", "step", "scale", (scale,), log_y=True, step=True),
        Chart("Gradient norm before clipping", "step", "norm", (norm,), log_y=True),
        Chart("Speed", "step", "examples per second", (speed,)),
    )
    return tuple(
        chart
        for chart in charts
        if any(np.isfinite(c.y).sum() > 1 for c in chart.curves)
        and (chart.curves != (scale,) or len({*scale.y}) > 1)
    )


def _time(steps: Sequence[Mapping[str, Any]], *, on_gpu: bool) -> Section:
    heading = "Where the time of a step went"
    timed = [record["seconds"] for record in steps if "seconds" in record]
    if not timed:
        return Section(heading)
    num_warm_up = min(_WARM_UP, len(timed) // 2)
    spent = np.array([[1000 * s[name] for name in _PARTS] for s in timed[num_warm_up:]])
    step_ms = spent.sum(1)
    rows: list[tuple[Cell, ...]] = []
    for name, part in [*zip(_PARTS, spent.T, strict=True), ("whole step", step_ms)]:
        median, p95 = (float(value) for value in np.percentile(part, [50, 95]))
        share = 100 * float(part.sum()) / (float(step_ms.sum()) or 1.0)
        rows.append((name, median, p95, share))
    columns = ("part", "median, ms", "95th percentile, ms", "share, %")
    note = (
        f"Over {len(spent):,} steps; the first {num_warm_up} are left out. "
        "Shares are of the total time, not of the median. The rest is what happens "
        "between these parts: seeding, learning rates, and summing the loss over "
        "processes, which synchronizes with a GPU."
    )
    notes = (note, _OF_HOST) if on_gpu else (note,)
    table = Table("", columns, tuple(rows), notes, digits=1)
    return Section(heading, tables=(table,))


def _cost(summary: Mapping[str, Any]) -> Table:
    titles = {
        "train_seconds": "time in training steps, s",
        "fit_seconds": "time for fitting the linear model, s",
        "evaluate_seconds": "time in evaluations, s",
        "save_seconds": "time in writing checkpoints, s",
        "tokenise_seconds": "time for tokenizing, once, s",
        "examples_per_s": "training examples per second",
        "padded_share": "padding fraction",
        "applied": "steps applied",
        "skipped": "steps skipped",
        "best_step": "step of the best weights",
        "loss_scale": "last loss scale",
        "processes": "processes",
    }
    rows = [(words, summary[key]) for key, words in titles.items() if key in summary]
    note = "Times and memory are this process's, since it was started or resumed."
    return Table("Time and steps", ("what", "value"), tuple(rows), (note,), digits=2)


def _memory(summary: Mapping[str, Any], *, on_gpu: bool) -> Table:
    sizes = {"peak": summary.get("peak_memory_bytes"), **(summary.get("memory") or {})}
    peak = "peak allocated by torch on the GPU" if on_gpu else "peak of the process"
    words = {"peak": peak, "moments": "optimizer's moments"}
    rows = [
        (words.get(name, name), size / 2**20)
        for name, size in sizes.items()
        if size is not None
    ]
    return Table("Memory", ("what", "MiB"), tuple(rows), digits=1)


def _settings(settings: Mapping[str, object], chosen: frozenset[str]) -> Table:
    words = {None: "none", True: "yes", False: "no"}
    rows: list[tuple[Cell, ...]] = []
    for key, value in settings.items():
        word = words[value] if value is None or isinstance(value, bool) else str(value)
        rows.append((key, word, "the run" if key in chosen else ""))
    return Table("", ("setting", "value", "chosen by"), tuple(rows))

"""The result of `halfstep.compare`: verdicts, tables, JSON and an HTML page."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.parity.candidate import PERTURBED, REFERENCE
from halfstep.parity.equivalence import Verdict, equivalence_test
from halfstep.reporting import html, json_fields
from halfstep.reporting.html import Chart, Curve, Section
from halfstep.reporting.table import Cell, Report, Table, write_text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from halfstep.parity.training_run import Run

MIB = 2**20
_MOST_SMOOTHED = 100
_CONSTANT = (
    "{} is the same for every seed of fp32, so it cannot tell levels apart: train "
    "longer, or use a finer metric"
)
_COST_NOTES = (
    "ms a step: median; peak: median over seeds; skipped: steps of all seeds",
    (
        "loss off by: largest difference to the loss of fp32 with the same seed, "
        f"of losses averaged over a 20th of the steps, at most {_MOST_SMOOTHED}"
    ),
    (
        "% in seeds: share of the steps where that is at most the largest difference "
        "between fp32 runs of two seeds; % in 1 ulp: between fp32 runs with and "
        "without a perturbation of the initial weights by one ulp"
    ),
)


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """The result of `halfstep.compare`; prints as tables."""

    levels: tuple[str, ...]
    """"O0:ulp", fp32 with perturbed initial weights; then the levels as written."""
    seeds: tuple[int, ...]
    """Seeds of the runs."""
    metric: str
    """Name of the metric."""
    lower_is_better: bool
    """Whether the metric is a loss."""
    margin: float
    """Largest difference of the metric that counts as none."""
    margin_reason: str
    """Where the margin comes from."""
    runs: tuple[Run, ...]
    """All runs, fp32 included."""
    notes: tuple[str, ...] = ()
    """Conditions of the comparison."""

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Level -> verdict."""
        verdicts = {}
        for level in self.levels:
            pairs = [pair for pair in self._pairs(level) if not pair[1].diverged]
            verdict = equivalence_test(
                [run.metric - base.metric for run, base in pairs if not run.diverged],
                self.margin,
                lower_is_better=self.lower_is_better,
                num_diverged=sum(bool(run.diverged) for run, _ in pairs),
            )
            if self._is_constant and verdict.difference == verdict.half_width == 0:
                verdict = replace(verdict, kind="unknown")
            verdicts[level] = verdict
        return verdicts

    @property
    def _is_constant(self) -> bool:
        """Whether all seeds of fp32 have the same metric."""
        return len({run.metric for run in self._of(REFERENCE.name)}) == 1

    def _of(self, level: str, *, with_diverged: bool = False) -> list[Run]:
        runs = [run for run in self.runs if run.level == level]
        return [run for run in runs if with_diverged or not run.diverged]

    def _pairs(self, level: str) -> list[tuple[Run, Run]]:
        """Return the runs of a level, each with the fp32 run of the same seed."""
        bases = {run.seed: run for run in self._of(REFERENCE.name, with_diverged=True)}
        runs = self._of(level, with_diverged=True)
        return [(run, bases[run.seed]) for run in runs]

    def __str__(self) -> str:
        """Return verdicts and costs as text."""
        return "\n\n".join(table.text() for table in self.tables())

    def __repr__(self) -> str:
        """Return the verdicts in one line."""
        verdicts = (f"{level} {one.kind}" for level, one in self.verdicts.items())
        return f"<Comparison of {self.metric} with fp32: {', '.join(verdicts)}>"

    def tables(self) -> tuple[Table, ...]:
        """Return verdicts, and costs with distances of the loss curves."""
        return self._verdict_table(), self._cost_table()

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`, with every run."""
        texts = {level: {"text": str(one)} for level, one in self.verdicts.items()}
        verdicts = {k: asdict(one) | texts[k] for k, one in self.verdicts.items()}
        plain: dict[str, Any] = json_fields.plain(asdict(self) | {"verdicts": verdicts})
        return plain

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `data` as JSON, atomically."""
        write_text(Path(path), json.dumps(self.data(), indent=1) + "\n")

    def page(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with the tables and the loss curves, atomically.

        Raises:
            UserError: jinja2 or matplotlib is not installed.
        """
        verdicts, costs = self.tables()
        sections = [
            Section("Verdicts", tables=(verdicts,)),
            Section("Loss", charts=self._charts(), tables=(costs,)),
        ]
        write_text(Path(path), html.page("Levels against fp32", sections))

    # Tables

    def _verdict_table(self) -> Table:
        base = _mean(self._of(REFERENCE.name))
        rows: list[tuple[str, ...]] = [
            (REFERENCE.name, _short(base), "-", "-", "the reference")
        ]
        for level, verdict in self.verdicts.items():
            numbers = _mean(self._of(level)), verdict.difference, verdict.half_width
            rows.append((level, *map(_short, numbers), str(verdict)))
        direction = "lower" if self.lower_is_better else "higher"
        seeds = ", ".join(map(str, self.seeds))
        notes = (
            f"{self.metric}: {direction} is better; mean over seeds {seeds}",
            f"margin {self.margin:.4g}: {self.margin_reason}",
            "to fp32: mean of the differences seed by seed; +-: half its 90 % interval",
            f"{PERTURBED.name}: fp32 with initial weights one ulp away: rounding alone",
            *(
                f"diverged: {run.level}, seed {run.seed}: {run.diverged}"
                for run in self.runs
                if run.diverged
            ),
            *([_CONSTANT.format(self.metric)] if self._is_constant else []),
            *self.notes,
        )
        columns = ("level", self.metric, "to fp32", "+-", "verdict")
        return Table("Levels against fp32", columns, tuple(rows), notes)

    def _cost_table(self) -> Table:
        base = _step_ms(self._of(REFERENCE.name))
        bands = self._seed_band, self.curve(PERTURBED.name)
        rows = []
        for level in (REFERENCE.name, *self.levels):
            runs = self._of(level, with_diverged=True)
            own = _step_ms(runs)
            peaks = [run.peak_bytes / MIB for run in runs if run.peak_bytes]
            curve = [] if level == REFERENCE.name else self.curve(level)
            cells: tuple[Cell, ...] = (
                own,
                own / base if own and base else None,
                statistics.median(peaks) if peaks else None,
                sum(run.skipped for run in runs),
                f"{max(curve):.2g}" if curve else "-",
                *(_share_within(curve, band) for band in bands),
            )
            rows.append((level, *cells))
        columns = (
            *("level", "ms a step", "x fp32", "peak MiB", "skipped", "loss off by"),
            *("% in seeds", "% in 1 ulp"),
        )
        return Table("Loss and cost", columns, tuple(rows), _COST_NOTES, digits=2)

    # Curves

    def curve(self, level: str) -> list[float]:
        """Return the largest difference to fp32's loss over seeds, for each step.

        Losses are `smoothed`; diverged runs are left out.
        """
        return _largest_gap(
            (smoothed(run.losses), smoothed(base.losses))
            for run, base in self._pairs(level)
            if not (run.diverged or base.diverged)
        )

    @cached_property
    def _seed_band(self) -> list[float]:
        """The largest difference between fp32 losses of two seeds, for each step."""
        curves = [smoothed(run.losses) for run in self._of(REFERENCE.name)]
        return _largest_gap(itertools.combinations(curves, 2))

    def _charts(self) -> tuple[Chart, ...]:
        def line(name: str, values: Sequence[float]) -> Curve:
            return Curve(name, tuple(range(1, len(values) + 1)), tuple(values))

        losses = []
        for level in (REFERENCE.name, *self.levels):
            curves = [smoothed(run.losses) for run in self._of(level)]
            means = map(statistics.fmean, zip(*curves, strict=True))
            losses.append(line(level, list(means)))
        gaps = [line(level, self.curve(level)) for level in self.levels]
        gaps.insert(0, line("fp32, two seeds", self._seed_band))
        return (
            Chart("Training loss, mean over seeds", "step", "loss", tuple(losses)),
            Chart(
                "Largest difference to fp32's loss of the same seed",
                *("step", "difference", tuple(gaps)),
                log_y=True,
            ),
        )


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the means of the last losses: of a 20th of the steps, at most of 100."""
    width = min(_MOST_SMOOTHED, max(1, len(losses) // 20))
    return [
        statistics.fmean(losses[max(0, end - width) : end])
        for end in range(1, len(losses) + 1)
    ]


def _largest_gap(pairs: Iterable[Sequence[Sequence[float]]]) -> list[float]:
    """Return the largest difference of any pair at each step; NaN where one is NaN."""
    gaps = [[abs(x - y) for x, y in zip(*pair, strict=True)] for pair in pairs]
    return [
        math.nan if any(map(math.isnan, values)) else max(values)
        for values in zip(*gaps, strict=True)
    ]


def _share_within(curve: Sequence[float], band: Sequence[float]) -> float | None:
    """Return at how many per cent of the steps a curve is at most a band."""
    if not (curve and band):
        return None
    within = sum(x <= y for x, y in zip(curve, band, strict=True))
    return 100 * within / len(curve)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _mean(runs: Sequence[Run]) -> float | None:
    return statistics.fmean(run.metric for run in runs) if runs else None


def _step_ms(runs: Sequence[Run]) -> float | None:
    """Return the median step; the first allocates, the last counts memory."""
    seconds = [each for run in runs for each in (run.seconds[1:-1] or run.seconds)]
    return 1e3 * statistics.median(seconds) if seconds else None

"""Renders reports as one self-contained HTML page: tables and charts."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from itertools import accumulate, cycle
from typing import TYPE_CHECKING

from halfstep.errors import UserError
from halfstep.reporting.table import Table, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.ticker import LogFormatter

_NOT_INSTALLED = (
    "report.html needs matplotlib and jinja2: install them with pip install "
    "'halfstep[report]', or in a checkout pip install -e '.[report]'."
)
_SHORT = 15  # letters of a name that needs no line break
_LONG = 60  # letters from which a cell needs a wide column
_MOST_POINTS = 2000  # charts are about 600 pixels wide: more points only add bytes
_LARGEST = 1e100  # far beyond float32; margins of an axis overflow at 1e308
# A palette that color-blind readers can distinguish.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_BLACK = "#000000"  # of matplotlib's texts and axes
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1rem 4rem;
  font: 1rem/1.55 system-ui, sans-serif; font-variant-numeric: tabular-nums;
  overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .75rem; }
.headline { display: grid; gap: .75rem; margin: 1.25rem 0;
  grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); }
.headline div { border: 1px solid #8886; border-radius: .375rem; padding: .6rem .9rem; }
.headline b { display: block; font-size: 1.35rem; line-height: 1.3;
  white-space: nowrap; }
.headline span { font-size: .8125rem; opacity: .7; display: block; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: 1.25rem;
  border-top: 1px solid #8886; }
p { margin: 0 0 .75rem; max-width: 42rem; }
figure { margin: 1.25rem 0 0; } figcaption { font-weight: 600; margin-bottom: .4rem; }
.lead, .note, th { opacity: .7; }
.note { font-size: .875rem; margin: .4rem 0 0; }
table { border-collapse: collapse; font-size: .9375rem; max-width: 100%; }
th, td { padding: .35rem 1.25rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #8886; min-width: 9rem; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
.number, .short { min-width: 0; white-space: nowrap; }
.number { text-align: right; } td.long { min-width: 15rem; }
.scroll { overflow-x: auto; }
.heat th, .heat td { min-width: 0; max-width: 8rem; padding: .3rem .6rem;
  text-align: center; vertical-align: middle; overflow-wrap: break-word; }
.heat tr:first-child th, .heat tbody th { text-align: left; }
.heat tbody th { font-weight: 400; }
.many td, .many th { padding: .2rem .3rem; font-size: .8125rem; }
.many tr + tr > [scope=col] { writing-mode: vertical-rl;
  text-orientation: sideways; text-align: right; }
.charts { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
svg { display: block; box-sizing: border-box; width: 100%; max-width: 36rem;
  height: auto; } svg text { fill: currentColor; }
@media (max-width: 40rem) { table { font-size: .8125rem; }
  th, td { padding-right: .6rem; min-width: 7rem; }
  .heat th, .heat td { padding: .3rem .35rem; } }
</style></head><body>
<h1>{{ title }}</h1>{% if lead %}<p class="lead">{{ lead }}</p>{% endif %}
{% if headline %}<div class="headline">{% for name, value, note in headline %}
<div><span>{{ name }}</span><b>{{ value }}</b><span>{{ note }}</span></div>
{% endfor %}</div>{% endif %}
{% for section in sections %}<section><h2>{{ section.heading }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.points %}<ul>{% for point in section.points %}
<li>{{ point }}</li>{% endfor %}</ul>{% endif %}
{% for table in section.tables %}{% set numeric = table.numeric() %}
<figure>{% if table.title %}<figcaption>{{ table.title }}</figcaption>{% endif %}
<div class="scroll" role="region" aria-label="{{ table.title }}" tabindex="0">
<table><thead><tr>{% for name in table.columns %}
<th scope="col" class="{{ kind(numeric[loop.index0], name) }}">{{ name }}</th>
{% endfor %}</tr></thead>
<tbody>{% for row in table.formatted_rows() %}<tr>{% for cell in row %}
<td class="{{ kind(numeric[loop.index0], cell) }}">{{ cell }}</td>
{% endfor %}</tr>{% endfor %}</tbody></table></div>
{% for note in table.notes %}<p class="note">{{ note }}</p>{% endfor %}</figure>
{% endfor %}{% for matrix in section.confusion_matrices %}{% set table = matrix.table %}
<figure>{% if table.title %}<figcaption>{{ table.title }}</figcaption>{% endif %}
<div class="scroll" role="region" aria-label="{{ table.title }}" tabindex="0">
<table class="heat{{ ' many' if table.columns | length > 10 }}"><thead><tr>
<th scope="col" rowspan="2">{{ table.columns[0] }}</th>
<th scope="colgroup" colspan="{{ table.columns | length - 1 }}">{{ matrix.across }}</th>
</tr><tr>{% for name in table.columns[1:] %}
<th scope="col" class="{{ kind(false, name) }}">{{ name }}</th>{% endfor %}</tr>
</thead><tbody>{% for name, cells in matrix.shaded_rows() %}<tr>
<th scope="row" class="{{ kind(false, name) }}">{{ name }}</th>
{% for count, colour in cells %}
<td style="background:{{ colour }}">{{ count }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div><p class="note">{{ matrix.legend }}</p>
{% for note in table.notes %}<p class="note">{{ note }}</p>{% endfor %}</figure>
{% endfor %}<div class="charts">{% for chart in section.charts %}
<figure><figcaption>{{ chart.title }}</figcaption>{{ chart.svg() | safe }}</figure>
{% endfor %}{% for drawing in section.drawings %}
<figure><figcaption>{{ drawing.title }}</figcaption>{{ drawing.svg | safe }}
{% for note in drawing.notes %}<p class="note">{{ note }}</p>{% endfor %}</figure>
{% endfor %}</div></section>
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class Curve:
    """A named line."""

    name: str
    "Shown in the legend; empty for none."
    x: tuple[float, ...]
    "Finite; the line runs through the points in this order."
    y: tuple[float, ...]
    "A value that is not finite leaves a gap."
    mean_over: int = 1
    """With more than one, the mean of this many points around each is drawn, and the
    points are pale behind it."""


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes."""

    title: str
    "What the chart shows: a caption in `page`, the words of a screen reader in `svg`."
    x_label: str
    "Quantity and unit."
    y_label: str
    "Quantity and unit."
    curves: tuple[Curve, ...]
    "Drawn in this order, in six colours that then repeat."
    log_y: bool = False
    "Logarithmic values; zero and below then leave a gap."
    step: bool = False
    "Hold each value until the next, for values that jump, such as a loss scale."

    def svg(self) -> str:
        """Return the chart as an SVG element, the same for the same chart.

        Of more than 2,000 points the minimum and maximum of each stretch are drawn.
        """
        names = [printable(curve.name) for curve in self.curves]
        across = 3 if max(map(len, names), default=0) <= _SHORT else 1

        def draw(axes: Axes) -> None:
            axes.set(xlabel=printable(self.x_label), ylabel=printable(self.y_label))
            axes.grid(color="#88888855")
            if self.log_y:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter(_plain_log_formatter())
            else:
                axes.ticklabel_format(useOffset=False)
            lowest = 1 / _LARGEST if self.log_y else -_LARGEST
            drawstyle = "steps-post" if self.step else "default"
            lines, values = [], set[float]()
            for curve, colour in zip(self.curves, cycle(_COLOURS), strict=False):
                x, y = thinned(curve, lowest)
                values.update(value for value in y if not math.isnan(value))
                if curve.mean_over > 1:
                    axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.8)
                    x, y = thinned(replace(curve, y=_centered_mean(curve)), lowest)
                lines += axes.plot(
                    x, y, color=colour, drawstyle=drawstyle, linewidth=1.3
                )
                # A point between two gaps has no line: draw a marker.
                gap = [True, *map(math.isnan, y), True]
                isolated = [i for i in range(len(y)) if gap[i] and gap[i + 2]]
                axes.plot(
                    [x[i] for i in isolated], [y[i] for i in isolated], ".", c=colour
                )
            places = {float(x) for curve in self.curves for x in curve.x}
            if all(map(float.is_integer, places)):  # no ticks between steps
                from matplotlib.ticker import MaxNLocator

                locator = MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True)
                axes.xaxis.set_major_locator(locator)
            for axis, ticks in ((axes.xaxis, places), (axes.yaxis, values)):
                if len(ticks) == 1:  # ticks beside it would tell nothing
                    axis.set_ticks([*ticks], [f"{tick:g}" for tick in ticks])
                    axis.set_ticks([], minor=True)
            if any(names):
                axes.figure.legend(
                    lines, names, loc="outside upper left", frameon=False, ncols=across
                )

        height = 2.8 + 0.22 * math.ceil(len(names) / across)
        return _svg(self.title, repr(self), height, draw)


def _svg(title: str, content: str, height: float, draw: Callable[[Axes], None]) -> str:
    """Return a figure as an SVG element; `content` is the salt of its ids.

    By default matplotlib numbers the parts of every figure alike, so figures on one
    page would share ids, and its salt and date change the bytes of equal figures.
    pyplot would set a backend for the whole program.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(_NOT_INSTALLED) from error

    rules = {
        "font.size": 10.5,
        "savefig.transparent": True,
        "svg.fonttype": "none",
        "svg.hashsalt": hashlib.sha256(content.encode()).hexdigest(),
        "text.parse_math": False,  # show dollar signs in names as they are
    }
    with style.context(rules, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the browser has the glyph
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["right", "top"]].set_visible(False)
        draw(axes)
        buffer = StringIO()
        nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
        figure.savefig(buffer, format="svg", metadata=nothing)
    # Remove group ids, which are unused and the same in every figure.
    element = re.sub('<g id="[^"]*"', "<g", buffer.getvalue().partition("<svg ")[2])
    element = element.replace(_BLACK, "currentColor")  # follows a dark theme
    return f'<svg role="img" aria-label="{escape(printable(title))}" {element}'


def _plain_log_formatter() -> LogFormatter:
    """Return matplotlib's log formatter, with labels like 60000 instead of 6e+04."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    return Plain()


@dataclass(frozen=True)
class ConfusionMatrix:
    """A table of counts whose cells are shaded by their share of the row.

    Cells whose row and column have the same name are blue, all others orange.
    """

    table: Table
    "Names of rows in the first column, counts in the others."
    across: str
    "What the columns of counts are; the name of the first column says what rows are."

    @property
    def legend(self) -> str:
        """Return how to read the shades."""
        names = f"{self.table.columns[0]} and {self.across}"
        return f"Stronger: a greater share of its row. Blue: {names} agree."

    def shaded_rows(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return each row's name, and (text, color) of its cells."""
        rows = []
        names = self.table.columns[1:]
        for row, texts in zip(
            self.table.rows, self.table.formatted_rows(), strict=True
        ):
            sizes = [cell if isinstance(cell, int | float) else 0 for cell in row[1:]]
            total = sum(sizes) or 1
            # Text stays readable on the darkest shade, on light and dark pages.
            depths = [0.6 * size / total for size in sizes]
            tones = ["0,114,178" if name == row[0] else "213,94,0" for name in names]
            colours = map("rgba({},{:.3f})".format, tones, depths)
            rows.append((texts[0], list(zip(texts[1:], colours, strict=True))))
        return rows


@dataclass(frozen=True)
class Drawing:
    """An SVG drawing from elsewhere."""

    title: str
    "Caption."
    svg: str
    "An SVG element, inserted as it is: its texts must be escaped."
    notes: tuple[str, ...] = ()
    "Sentences shown below it."


@dataclass(frozen=True)
class Section:
    """A part of a page; its contents are shown in the order of the fields."""

    heading: str
    "A few words."
    text: str = ""
    "Plain text."
    points: tuple[str, ...] = ()
    "Items of a list."
    tables: tuple[Table, ...] = ()
    "One below the other."
    confusion_matrices: tuple[ConfusionMatrix, ...] = ()
    "One below the other."
    charts: tuple[Chart, ...] = ()
    "Side by side where the window is wide enough."
    drawings: tuple[Drawing, ...] = ()
    "Beside the charts."


def page(
    title: str,
    sections: Sequence[Section],
    lead: str = "",
    headline: Sequence[tuple[str, str, str]] = (),
) -> str:
    """Return a complete HTML document without references to external files.

    All arguments are shown as text, never as HTML: the lead below the title, and the
    headline, name, value and note of each main result.

    Raises:
        UserError: jinja2 is not installed, or matplotlib is not and there is a chart.
    """
    try:
        from jinja2 import Template
    except ModuleNotFoundError as error:
        raise UserError(_NOT_INSTALLED) from error

    def escape_text(value: object) -> object:
        """Escape each text that the template shows, but the HTML made below."""
        return printable(value) if type(value) is str else value

    document: str = Template(
        _PAGE, trim_blocks=True, autoescape=True, finalize=escape_text
    ).render(
        title=title,
        sections=sections,
        lead=lead,
        headline=headline,
        kind=_kind,
    )
    return document


def _kind(number: bool, word: str) -> str:
    """Return the CSS class of a cell, which determines where it may be wrapped."""
    if number:
        return "number"
    return "short" if len(word) <= _SHORT else "long" if len(word) > _LONG else ""


def _centered_mean(curve: Curve) -> tuple[float, ...]:
    """Return the mean of the finite values around each point."""
    finite = [math.isfinite(value) for value in curve.y]
    values = (value if real else 0 for value, real in zip(curve.y, finite, strict=True))
    sums, counts = [0.0, *accumulate(values)], [0, *accumulate(finite)]
    means = []
    for i in range(len(finite)):
        begin = max(0, i - curve.mean_over // 2)
        end = min(len(finite), i + curve.mean_over // 2 + 1)
        count = counts[end] - counts[begin]
        means.append((sums[end] - sums[begin]) / count if count else math.nan)
    return tuple(means)


def thinned(curve: Curve, lowest: float) -> tuple[list[float], list[float]]:
    """Return x and y to draw: NaN for a gap, long curves thinned to extremes."""
    y = [value if lowest <= value <= _LARGEST else math.nan for value in curve.y]
    places = range(len(y))
    size = math.ceil(4 * len(y) / _MOST_POINTS) if len(y) > _MOST_POINTS else 1
    indices = {*places[:1], *places[-1:]}
    for start in places[::size]:
        gaps = [i for i in places[start : start + size] if math.isnan(y[i])]
        finite = [i for i in places[start : start + size] if not math.isnan(y[i])]
        finite.sort(key=y.__getitem__)
        indices.update(gaps[:1], finite[:1], finite[-1:])
    points = list(zip(curve.x, y, strict=True))
    drawn = [points[i] for i in sorted(indices)]
    return [x for x, _ in drawn], [y for _, y in drawn]

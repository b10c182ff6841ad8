"""Turns values into text, markdown, json and html.

In: tables, curves and words that others have measured. Out: strings, and files that
are written whole or not at all. matplotlib and jinja2 are imported by what needs them.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import unicodedata
import warnings
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import chain, cycle, zip_longest
from typing import TYPE_CHECKING

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Cell = str | int | float | bool | None

_NOT_INSTALLED = (
    "report.html needs matplotlib and jinja2: "
    "install them with pip install 'halfstep[report]'."
)
_MOST_POINTS = 2000  # a chart is some 600 pixels wide: more points only cost bytes
_LARGEST = 1e100  # far beyond float32; the margins of an axis overflow at 1e308
_NARROWEST = 12  # terminal columns below which wrapped words are unreadable
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
# Colour-blind readers tell these apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
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
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: 1.25rem;
  border-top: 1px solid #8886; }
p { margin: 0 0 .75rem; max-width: 42rem; white-space: pre-line; }
figure { margin: 1.25rem 0 0; } figcaption { font-weight: 600; margin-bottom: .4rem; }
.lead, .note, th { opacity: .7; }
.note { font-size: .875rem; margin: .4rem 0 0; }
table { border-collapse: collapse; font-size: .9375rem; width: max-content; }
th, td { padding: .35rem 1.25rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #8886; max-width: 22rem; }
.number { text-align: right; } .scroll { overflow-x: auto; }
.charts { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
svg { display: block; box-sizing: border-box; width: 100%; max-width: 36rem;
  height: auto; padding: .5rem; background: #fff; border-radius: .375rem; }
</style></head><body>
<h1>{{ title }}</h1>{% if lead %}<p class="lead">{{ lead }}</p>{% endif %}
{% for section in sections %}<section><h2>{{ section.heading }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% for table in section.tables %}{% set numeric = numbers(table) %}
<figure>{% if table.title %}<figcaption>{{ table.title }}</figcaption>{% endif %}
<div class="scroll" role="region" aria-label="{{ table.title }}" tabindex="0">
<table><thead><tr>{% for name in table.columns %}
<th scope="col" class="{{ 'number' if numeric[loop.index0] }}">{{ name }}</th>
{% endfor %}</tr></thead>
<tbody>{% for row in shown(table) %}<tr>{% for cell in row %}
<td class="{{ 'number' if numeric[loop.index0] }}">{{ cell }}</td>
{% endfor %}</tr>{% endfor %}</tbody></table></div>
{% for note in table.notes %}<p class="note">{{ note }}</p>{% endfor %}</figure>
{% endfor %}<div class="charts">{% for chart in section.charts %}
<figure><figcaption>{{ chart.title }}</figcaption>{{ chart.svg() | safe }}</figure>
{% endfor %}</div></section>
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class Table:
    """A titled grid of cells.

    A float is shown with `digits` digits after the point, None as "-", a bool as yes
    or no. A column of numbers is aligned right, any other left.

    Raises:
        ValueError: A row is not as long as `columns`, or two columns share a name.
    """

    title: str
    "Shown above the table; empty for none."
    columns: tuple[str, ...]
    "Names, each once: they are the keys in `data`."
    rows: tuple[tuple[Cell, ...], ...]
    "In each as many cells as there are columns; no rows is fine."
    notes: tuple[str, ...] = ()
    "Sentences shown below the table."
    digits: int = 3
    "Digits after the point, 0 or more; 3 tell most losses apart."

    def __post_init__(self) -> None:
        if len(set(self.columns)) < len(self.columns):
            message = f"Table {self.title!r} names a column twice: {self.columns}."
            raise ValueError(message)
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                lengths = f"{len(self.columns)} columns but {len(row)} cells in row {i}"
                message = f"Table {self.title!r} has {lengths}."
                raise ValueError(message)

    def text(self, width: int | None = None) -> str:
        """Lay the table out for a terminal or a pipe.

        Why: `len` counts a Chinese character as one and a terminal shows it two wide,
        so columns padded by `len` do not line up.

        Args:
            width: Terminal columns to fit, 1 or more: the last column of words, the
                title and the notes are wrapped. Where the other columns leave no room
                the table stays too wide. None, for a pipe, wraps nothing.

        Returns:
            Lines without blanks or a newline at the end.
        """
        grid = [tuple(map(_line, self.columns)), *_shown(self)]
        numeric = _numeric(self)
        sizes = [max(map(_width, column)) for column in zip(*grid, strict=True)]
        words = [j for j, number in enumerate(numeric) if not number]
        if width is not None and words:
            excess = sum(sizes) + 2 * (len(sizes) - 1) - width
            full = sizes[words[-1]]
            sizes[words[-1]] = min(full, max(full - excess, _NARROWEST))
        head, *body = [_stacked(row, sizes, numeric) for row in grid]
        rule = "  ".join("-" * size for size in sizes)
        title = _wrapped(self.title, width) if self.title else []
        notes = chain.from_iterable(_wrapped(note, width) for note in self.notes)
        return "\n".join([*title, *head, rule, *chain.from_iterable(body), *notes])

    def markdown(self) -> str:
        """Return a GitHub table; what markdown would read as a mark is escaped."""
        marks = ["---:" if number else "---" for number in _numeric(self)]
        head, *body = [map(_plain, row) for row in (self.columns, *_shown(self))]
        lines = [f"| {' | '.join(cells)} |" for cells in (head, marks, *body)]
        title = [f"**{_plain(self.title)}**"] if self.title else []
        return "\n\n".join([*title, "\n".join(lines), *map(_plain, self.notes)])

    def data(self) -> dict[str, object]:
        """Return title, columns, notes and rows, as dicts by column, for `json.dumps`.

        Why: JSON has no nan and no infinity, and Python writes them all the same. Here
        they become the strings "nan", "inf" and "-inf", which `float` reads back; null
        would make a loss that blew up look like one that was never measured.
        """
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        for row in rows:
            for name, cell in row.items():
                if isinstance(cell, float) and not math.isfinite(cell):
                    row[name] = str(cell)
        columns, notes = list(self.columns), list(self.notes)
        return {"title": self.title, "columns": columns, "rows": rows, "notes": notes}


@dataclass(frozen=True)
class Curve:
    """A named line.

    Raises:
        ValueError: `x` and `y` differ in length.
    """

    name: str
    "Shown in the legend; empty for none."
    x: tuple[float, ...]
    "Finite; the line runs through the points in this order."
    y: tuple[float, ...]
    "A value that is not finite leaves a gap."

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            message = f"Curve {self.name!r} has {len(self.x)} x and {len(self.y)} y."
            raise ValueError(message)


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
    "Hold each value until the next: for what jumps, such as a loss scale."

    def svg(self) -> str:
        """Draw the chart as an element to put into HTML.

        Why: matplotlib numbers the parts of every figure alike, so figures on one page
        share ids, and its salt and date change the bytes of equal figures: the salt
        here is the chart. pyplot would choose a backend for the whole program.

        Returns:
            The same string for the same chart and the same matplotlib. Of more than
            2,000 points the least and the greatest of each stretch are drawn.

        Raises:
            UserError: matplotlib is not installed.
        """
        try:
            from matplotlib import style
            from matplotlib.figure import Figure
            from matplotlib.ticker import LogFormatter
        except ModuleNotFoundError as error:
            raise UserError(_NOT_INSTALLED) from error
        names = [curve.name for curve in self.curves]
        rules = {
            "font.size": 10.5,
            "svg.fonttype": "none",
            "svg.hashsalt": hashlib.sha256(repr(self).encode()).hexdigest(),
            "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        }
        with style.context(rules, after_reset=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # the browser has it
            inches = (5.2, 2.8 + 0.22 * len(names))  # one row of legend for each name
            figure = Figure(figsize=inches, layout="constrained")
            axes = figure.subplots()
            axes.set(xlabel=self.x_label, ylabel=self.y_label)
            axes.spines[["right", "top"]].set_visible(False)
            axes.grid(color="#e4e6ea")
            if self.log_y:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter(LogFormatter())
            lowest = 1 / _LARGEST if self.log_y else -_LARGEST
            held = "steps-post" if self.step else "default"
            lines = []
            for curve, colour in zip(self.curves, cycle(_COLOURS), strict=False):
                x, y = _points(curve, lowest)
                lines += axes.plot(x, y, color=colour, drawstyle=held, linewidth=1.3)
                # A point between two gaps has no line to show it: mark it.
                gap = [True, *map(math.isnan, y), True]
                alone = [i for i in range(len(y)) if gap[i] and gap[i + 2]]
                axes.plot([x[i] for i in alone], [y[i] for i in alone], ".", c=colour)
            if any(names):
                figure.legend(lines, names, loc="outside upper left", frameon=False)
            drawn = StringIO()
            nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
            figure.savefig(drawn, format="svg", metadata=nothing)
        # Groups have an id that nothing refers to, the same in every figure.
        element = re.sub('<g id="[^"]*"', "<g", drawn.getvalue().partition("<svg ")[2])
        return f'<svg role="img" aria-label="{escape(_line(self.title))}" {element}'


@dataclass(frozen=True)
class Section:
    """A part of a page: heading, text, tables, charts, in this order."""

    heading: str
    "A few words."
    text: str = ""
    "Plain text; line breaks are kept."
    tables: tuple[Table, ...] = ()
    "One below the other."
    charts: tuple[Chart, ...] = ()
    "Side by side where the window is wide enough."


def page(title: str, sections: Sequence[Section], lead: str = "") -> str:
    """Write a complete HTML document that refers to nothing outside itself.

    Args:
        title: Heading of the page, and its name in the browser.
        sections: Parts of the page in order.
        lead: What the page says in a sentence or two, below the title.

    Returns:
        The document; whatever the arguments hold is shown as text, never as HTML.

    Raises:
        UserError: jinja2 is not installed, or matplotlib is not and there is a chart.
    """
    try:
        from jinja2 import Template
    except ModuleNotFoundError as error:
        raise UserError(_NOT_INSTALLED) from error
    document: str = Template(_PAGE, trim_blocks=True, autoescape=True).render(
        title=title, sections=sections, lead=lead, shown=_shown, numbers=_numeric
    )
    return document


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file so that whoever opens `path` finds all of it or the old one.

    Args:
        path: File to write or to replace, through links; its directory exists.
        text: Contents; line ends are written as they are.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", newline="")  # a terminal, a pipe
        return
    path = path.resolve()
    # The mode of a file from `tempfile` would hide the report from other users.
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _numeric(table: Table) -> list[bool]:
    """Tell for each column whether it holds numbers, None aside, and nothing else."""
    rows, count = table.rows, len(table.columns)
    kinds = [{type(row[j]) for row in rows} for j in range(count)]
    return [bool(k) and not any(issubclass(t, str | bool) for t in k) for k in kinds]


def _shown(table: Table) -> list[tuple[str, ...]]:
    """Return the rows as the words that every format shows."""

    def word(cell: Cell) -> str:
        if cell is None or isinstance(cell, bool):
            return {None: "-", True: "yes", False: "no"}[cell]
        if isinstance(cell, float):
            return f"{cell:z.{table.digits}f}"  # z: no "-0.000"
        return _line(str(cell))

    return [tuple(map(word, row)) for row in table.rows]


def _line(text: str) -> str:
    """Replace line breaks and escape codes, which would tear a table apart."""
    return _CONTROL.sub(" ", text)


def _plain(text: str) -> str:
    """Escape what GitHub's markdown would read as a cell's end, a mark or a tag."""
    return re.sub(r"[\\|<*`]", r"\\\g<0>", _line(text))


def _width(text: str) -> int:
    """Count the terminal columns that `text` takes: 2 for wide, 0 for combining."""
    narrow = sum(unicodedata.category(c) not in {"Mn", "Me", "Cf"} for c in text)
    return narrow + sum(unicodedata.east_asian_width(c) in {"W", "F"} for c in text)


def _padded(text: str, size: int, right: bool) -> str:
    blank = " " * (size - _width(text))
    return blank + text if right else text + blank


def _stacked(row: tuple[str, ...], sizes: list[int], numeric: list[bool]) -> list[str]:
    """Lay out one row as the lines that its tallest cell needs."""
    stacks = map(_wrapped, row, sizes)
    return [
        "  ".join(map(_padded, parts, sizes, numeric)).rstrip()
        for parts in zip_longest(*stacks, fillvalue="")
    ]


def _wrapped(text: str, size: int | None) -> list[str]:
    """Break `text` at blanks, or anywhere where there are none, as in Chinese."""
    text, lines = _line(text).strip(), []
    while size is not None and _width(text) > size:
        fits = [i for i in range(2, size + 1) if _width(text[:i]) <= size] or [1]
        end = max(text.rfind(" ", 0, fits[-1] + 1), 0) or fits[-1]
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def _points(curve: Curve, lowest: float) -> tuple[list[float], list[float]]:
    """Return x and y to draw: nan for a gap, long curves thinned with their spikes."""
    y = [value if lowest <= value <= _LARGEST else math.nan for value in curve.y]
    places = range(len(y))
    size = math.ceil(4 * len(y) / _MOST_POINTS) if len(y) > _MOST_POINTS else 1
    kept = {*places[:1], *places[-1:]}
    for start in places[::size]:
        gaps = [i for i in places[start : start + size] if math.isnan(y[i])]
        seen = [i for i in places[start : start + size] if not math.isnan(y[i])]
        seen.sort(key=y.__getitem__)
        kept.update(gaps[:1], seen[:1], seen[-1:])
    return [curve.x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]

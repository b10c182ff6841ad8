"""The laws of `halfstep.report`: what is shown, what is drawn, what is written."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep import report
from halfstep.errors import UserError
from halfstep.report import Chart, Curve, Section, Table, page, write_text

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
TABLE = Table(
    "Runs",
    ("name", "steps", "loss", "finite"),
    (
        ("bf16", 10, 0.5, True),
        ("混合精度", 2000, math.nan, False),
        ("x", None, -1.25, None),
    ),
    ("Lower is better.",),
)


def chart(*y: float, title: str = "Loss", **options: bool) -> Chart:
    """Return a chart of one curve over 0, 1, 2, ..."""
    curve = Curve("a", tuple(map(float, range(len(y)))), y)
    return Chart(title, "step", "loss", (curve,), **options)


def words(svg: str) -> list[str]:
    """Return the texts of a chart: ticks, labels, legend."""
    return [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if text]


def strokes(svg: str) -> list[str]:
    """Return the path data of what is drawn in the first colour inside the axes."""
    return re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="[^"]*#0072b2', svg)


def test_text_lines_columns_up_by_display_width() -> None:
    """Law: numbers right, words left, a Chinese character takes two columns."""
    assert TABLE.text().split("\n") == [
        "Runs",
        "name      steps    loss  finite",
        "--------  -----  ------  ------",
        "bf16         10   0.500  yes",
        "混合精度   2000     nan  no",
        "x             -  -1.250  -",
        "Lower is better.",
    ]


def test_text_wraps_the_last_column_of_words() -> None:
    """Law: at a width the last column of words breaks, and so do title and notes."""
    table = Table(
        "",
        ("k", "remark", "p"),
        (("a", "one two three four", 0.5), ("b", "一二三四五六七八九十", 0.25)),
    )
    assert table.text(24).split("\n") == [
        "k  remark              p",
        "-  --------------  -----",
        "a  one two three   0.500",
        "   four",
        "b  一二三四五六七  0.250",
        "   八九十",
    ]
    table = Table("a b c d", ("n",), ((1,),), ("one two",))
    assert table.text(4).split("\n") == ["a b", "c d", "n", "-", "1", "one", "two"]
    crowded = Table("", ("remark",), (("one two three",),)).text(1)
    assert crowded.split("\n") == ["remark", "-" * 12, "one two", "three"]


letters = st.text(st.sampled_from("ab 中文"), max_size=60).map(str.strip)


@given(st.lists(st.tuples(letters, letters), max_size=4), st.integers(30, 90))
def test_wrapping_loses_nothing_and_fits(
    rows: list[tuple[str, str]], width: int
) -> None:
    """Law: wrapped lines fit where the other columns leave room; no letter is lost."""
    table = Table("", ("key", "words"), tuple((k[:5], v) for k, v in rows))
    text = table.text(width)
    for line in text.split("\n"):
        assert len(line) + sum(line.count(wide) for wide in "中文") <= width
    shown = "".join(text.split("\n")[2:])
    cells = "".join(k[:5] + v for k, v in rows)
    assert sorted(shown.replace(" ", "")) == sorted(cells.replace(" ", ""))


def test_text_of_a_table_without_rows() -> None:
    """Law: no rows leaves title, header and rule."""
    assert Table("None yet", ("a", "bc"), ()).text() == "None yet\na  bc\n-  --"


def test_cells_cannot_tear_the_table() -> None:
    """Law: line breaks and escape codes become blanks in text and markdown."""
    table = Table("t", ("a",), (("x\ny\x1b[31m\u2028z",),))
    assert table.text().split("\n")[3] == "x y [31m z"
    assert table.markdown().split("\n")[-1] == "| x y [31m z |"


@pytest.mark.parametrize(
    ("cell", "digits", "shown"),
    [
        (1.23456, 2, "1.23"),
        (2.0, 0, "2"),
        (-0.0001, 3, "0.000"),
        (math.inf, 3, "inf"),
        (-math.inf, 3, "-inf"),
        (65536, 3, "65536"),
        (True, 3, "yes"),
        (False, 3, "no"),
        (None, 3, "-"),
    ],
)
def test_how_a_cell_is_shown(cell: report.Cell, digits: int, shown: str) -> None:
    """Law: a float has `digits` digits and no minus zero, None is -, a bool a word."""
    table = Table("", ("a",), ((cell,),), digits=digits)
    assert table.text().split("\n")[-1].strip() == shown


def test_combining_letters_take_no_column() -> None:
    """Law: an accent of its own code point does not widen a column."""
    table = Table("", ("ab", "c"), (("e\u0301", "x"),))
    assert table.text().split("\n")[-1] == "e\u0301   x"


def test_markdown() -> None:
    """Law: columns of numbers are marked right-aligned; pipes and marks are escaped."""
    table = Table("T*", ("a|b", "n"), (("x\\|<b>`", 1), ("_y_", None)), ("n < 3",))
    assert table.markdown().split("\n") == [
        r"**T\***",
        "",
        r"| a\|b | n |",
        "| --- | ---: |",
        r"| x\\\|\<b>\` | 1 |",
        "| _y_ | - |",
        "",
        r"n \< 3",
    ]


def test_data_is_json_and_tells_unmeasured_from_not_finite() -> None:
    """Law: strict JSON holds it; None is null, nan and infinities are strings."""
    table = Table("t", ("a", "b"), ((math.nan, -math.inf), (None, 1 / 3)), ("note",))
    assert json.loads(json.dumps(table.data(), allow_nan=False)) == {
        "title": "t",
        "columns": ["a", "b"],
        "rows": [{"a": "nan", "b": "-inf"}, {"a": None, "b": 1 / 3}],
        "notes": ["note"],
    }


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Table, (("a", "b"), ((1, 2), (3,))), "has 2 columns but 1 cells in row 1."),
        (Table, (("a", "a"), ()), "names a column twice: ('a', 'a')."),
        (Curve, ((1.0, 2.0, 3.0), (1.0, 2.0)), "has 3 x and 2 y."),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: type[Table | Curve], values: tuple[Any, Any], message: str
) -> None:
    """Law: a programmer's error is a plain ValueError that says what does not fit."""
    with pytest.raises(ValueError, match="Runs") as caught:
        kind("Runs", *values)
    assert type(caught.value) is ValueError
    assert str(caught.value) == f"{kind.__name__} 'Runs' {message}"


def test_the_same_chart_gives_the_same_bytes() -> None:
    """Law: neither the process, nor its hash seed, nor a matplotlibrc matters."""
    code = (
        "import sys; from halfstep.report import Chart, Curve\n"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules\n"
        "curve = Curve('a', (0.0, 1.0, 2.0), (1.0, 3.0, 2.0))\n"
        "print(Chart('Loss', 'step', 'loss', (curve,)).svg(), end='')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
    )
    with mpl.rc_context({"lines.linewidth": 9, "axes.facecolor": "red"}):
        here = chart(1.0, 3.0, 2.0).svg()
        assert mpl.rcParams["lines.linewidth"] == 9
    assert done.stdout == here


def test_svg_embeds_in_html() -> None:
    """Law: one named svg element, no prolog, no metadata, texts as texts."""
    svg = chart(1.0, 2.0, title='Loss <"of"> A&B').svg()
    root = ET.fromstring(svg)  # noqa: S314 -- our own text
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label") == 'Loss <"of"> A&B'
    assert "<metadata" not in svg
    assert {"step", "loss", "a"} <= set(words(svg))


def test_not_finite_values_leave_a_gap_and_do_not_stretch_the_axis() -> None:
    """Law: nan, infinity and what no axis can hold interrupt the line, no more."""
    whole = words(chart(1.0, 2.0, 2.0, 3.0, 2.0).svg())
    for value in (math.nan, math.inf, -math.inf, 1e308):
        svg = chart(1.0, 2.0, value, 3.0, 2.0).svg()
        (line,) = strokes(svg)
        assert line.count("M") == 2
        assert words(svg) == whole


def test_zero_is_a_gap_on_a_logarithmic_axis() -> None:
    """Law: what has no logarithm is left out; ticks are plain numbers."""
    svg = chart(0.01, 1.0, 0.0, 100.0, 1.0, log_y=True).svg()
    assert [line.count("M") for line in strokes(svg)] == [2]
    assert {"0.01", "1", "100"} <= set(words(svg))
    assert "$" not in "".join(words(chart(2.0, 3.0, log_y=True).svg()))


def test_a_point_between_gaps_is_marked() -> None:
    """Law: a value without neighbours is seen; one with neighbours has no mark."""
    mark = r"<use [^>]*#0072b2"
    assert len(re.findall(mark, chart(math.nan, 1.0, math.nan, 3.0, 2.0).svg())) == 1
    assert len(re.findall(mark, chart(0.0, 1.0, 0.0, log_y=True).svg())) == 1
    assert not re.findall(mark, chart(1.0, 2.0).svg())


def test_steps_hold_a_value_until_the_next() -> None:
    """Law: a step goes along, then up; a line goes straight."""
    (line,) = strokes(chart(1.0, 2.0).svg())
    (stair,) = strokes(chart(1.0, 2.0, step=True).svg())
    assert len(line.split()) == 6  # M x y L x y
    _, _, y0, _, x1, y1, _, x2, _ = stair.split()
    assert (x1, y1) == (x2, y0)


def test_names_are_shown_as_they_are() -> None:
    """Law: dollars are no formula, Chinese no warning, an empty name no legend."""
    curve = Curve("$a$ 损失 <b>", (0.0, 1.0), (1.0, 2.0))
    svg = Chart("损失", "步 $x$", "y_1", (curve,)).svg()
    assert {"$a$ 损失 &lt;b&gt;", "步 $x$", "y_1"} <= set(words(svg))
    unnamed = Chart("t", "x", "y", (Curve("", (0.0, 1.0), (1.0, 2.0)),)).svg()
    assert [drawn.count("#0072b2") for drawn in (svg, unnamed)] == [2, 1]


anything = st.lists(st.floats(), max_size=6).map(tuple)


@settings(max_examples=20, deadline=None)
@given(anything, st.booleans(), st.booleans())
def test_any_values_can_be_drawn(y: tuple[float, ...], log_y: bool, step: bool) -> None:
    """Law: no list of floats, the empty one included, warns or fails."""
    ET.fromstring(chart(*y, log_y=log_y, step=step).svg())  # noqa: S314


def test_long_curves_keep_their_spikes_gaps_and_ends() -> None:
    """Law: a spike of a single point is drawn whichever points are left out."""
    y = [math.sin(i / 1000) for i in range(50_000)]
    y[12_345], y[23_456], y[34_567] = 9.0, -9.0, math.nan
    y[1], y[-2] = -2.0, 2.0  # so that neither end is the least or the greatest
    curve = Curve("a", tuple(map(float, range(50_000))), tuple(y))
    xs, ys = report._points(curve, lowest=-1e100)
    assert xs == sorted(xs)
    assert (xs[0], xs[-1]) == (0.0, 49_999.0)
    drawn = dict(zip(xs, ys, strict=True))
    assert (drawn[12_345.0], drawn[23_456.0]) == (9.0, -9.0)
    assert math.isnan(drawn[34_567.0])


@pytest.mark.parametrize("count", [0, 1, 2000, 2001, 8000, 9999])
def test_how_many_points_are_drawn(count: int) -> None:
    """Law: up to 2,000 points all, of more some but never more than 2,000."""
    x = tuple(map(float, range(count)))
    y = tuple((math.nan, 1.0, -1.0, 0.0)[i % 4] for i in range(count))
    xs, ys = report._points(Curve("a", x, y), lowest=-1e100)
    assert len(xs) == len(ys)
    assert 1000 <= len(xs) <= 2000 if count > 2000 else tuple(xs) == x


@pytest.fixture(scope="module")
def html() -> str:
    """Return a page with two tables and three charts, two of the same title."""
    charts = (chart(1.0, 2.0), chart(1.0, 3.0), chart(1.0, 2.0, title="Scale"))
    tables = (TABLE, Table("Nothing", ("only",), ()))
    sections = (Section("One", "Some text.", tables), Section("Two", charts=charts))
    return page("A run", sections, "It went well.")


def parsed(html: str) -> ET.Element:
    """Parse a page as XML, which fails where a tag is not closed in order."""
    doctype, _, document = html.partition("\n")
    assert doctype == "<!doctype html>"
    return ET.fromstring(re.sub("(<meta[^>]*)>", r"\1/>", document))  # noqa: S314


def test_page_is_one_whole_document(html: str) -> None:
    """Law: everything given is there, once and in its order."""
    body = parsed(html)[1]
    assert [len(body.findall(f".//{tag}")) for tag in ("table", "tr")] == [2, 5]
    assert len(body.findall(".//{*}svg")) == 3
    expected = ["A run", "It went well.", "One", "Some text.", "Runs", "name", "bf16"]
    expected += ["10", "0.500", "yes", "混合精度", "Lower is better.", "Nothing", "Two"]
    assert [text for text in body.itertext() if text in expected] == expected


def test_page_declares_what_browsers_need(html: str) -> None:
    """Law: language, encoding, a phone's width, dark colours, a box for wide tables."""
    root = parsed(html)
    assert root.get("lang") == "en"
    charset, viewport = root.findall("head/meta")
    assert charset.get("charset") == "utf-8"
    assert viewport.get("content") == "width=device-width, initial-scale=1"
    assert len(root.findall(".//div[@class='scroll']/table")) == 2
    assert ":root { color-scheme: light dark; }" in html
    assert re.search(r"svg {[^}]*background: #fff;", html)


def test_page_needs_nothing_from_outside(html: str) -> None:
    """Law: no address but the names of namespaces, nothing that loads or runs."""
    assert set(re.findall(r"https?://[^\"'\s<]*", html)) == NAMESPACES
    loads = r"<(script|link|img|iframe)|@import| src=| href=|(url\(|xlink:href=\")[^#]"
    assert not re.search(loads, html)


def test_charts_of_a_page_share_no_id(html: str) -> None:
    """Law: each id is there once, even if titles are equal, and each reference hits."""
    ids = [value for e in parsed(html).iter() if (value := e.get("id")) is not None]
    assert len(ids) == len(set(ids)) > 3
    assert set(re.findall(r'(?:url\(|href=")#(\w+)', html)) == set(ids)


def test_page_shows_markup_as_text() -> None:
    """Law: no argument can add an element."""
    mark = "<script>\"'&"
    table = Table(mark, (mark,), ((mark,),), (mark,))
    drawn = Chart(mark, mark, mark, (Curve(mark, (0.0, 1.0), (0.0, 1.0)),))
    html = page(mark, [Section(mark, mark, (table,), (drawn,))], mark)
    # Page 3, section 2, table 4, chart 1 and in its drawing 3.
    assert list(parsed(html).itertext()).count(mark) == 13


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without matplotlib or jinja2 the message says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as caught:
        page("t", [Section("s", charts=(chart(1.0, 2.0),))])
    assert str(caught.value) == (
        "report.html needs matplotlib and jinja2: "
        "install them with pip install 'halfstep[report]'."
    )


def test_write_text_replaces_a_file(tmp_path: Path) -> None:
    """Law: UTF-8, line ends as given, the mode of any new file, nothing left over."""
    path = tmp_path / "report.html"
    path.write_text("old and longer than the new one")
    write_text(path, "损失\r\n0.5\n")
    assert path.read_bytes() == b"\xe6\x8d\x9f\xe5\xa4\xb1\r\n0.5\n"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_write_text_keeps_the_old_file_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: text that cannot be encoded, or an interrupt, leaves the old file alone."""
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

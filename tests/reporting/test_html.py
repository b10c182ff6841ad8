"""The laws of `halfstep.reporting.html`: what is drawn, and one page that holds it."""

import math
import os
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from data_files import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.reporting.html import (
    Chart,
    ConfusionMatrix,
    Curve,
    Section,
    page,
    thinned,
)
from halfstep.reporting.table import Table

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


def chart(*y: float, title: str = "Loss", mean_over: int = 1, **options: bool) -> Chart:
    """Return a chart of one curve over 0, 1, 2, ..."""
    curve = Curve("a", tuple(map(float, range(len(y)))), y, mean_over)
    return Chart(title, "step", "loss", (curve,), **options)


def words(svg: str) -> list[str]:
    return [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if text]


def strokes(svg: str) -> list[str]:
    """Return the path data of what is drawn in the first colour inside the axes."""
    return re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="[^"]*#0072b2', svg)


def test_the_same_chart_gives_the_same_bytes() -> None:
    """Law: neither the process, nor its hash seed, nor a matplotlibrc matters."""
    code = (
        "import sys; from halfstep.reporting.html import Chart, Curve\n"
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


def test_a_mean_is_drawn_over_pale_points() -> None:
    """Law: each point of the mean is that of the finite values around it."""
    svg = chart(2.0, 4.0, math.nan, 6.0, mean_over=3).svg()
    assert svg.count("stroke-opacity: 0.3;") == 1
    raw, mean = (
        [float(y) for y in re.findall(r"[ML] \S+ (\S+)", line)] for line in strokes(svg)
    )
    values = [2 + 4 * (raw[0] - y) / (raw[0] - raw[2]) for y in mean]
    assert values == pytest.approx([3, 3, 5, 6])


def test_a_point_between_gaps_is_marked() -> None:
    """Law: a value without neighbours is seen; one with neighbours has no mark."""
    mark = r"<use [^>]*#0072b2"
    assert len(re.findall(mark, chart(math.nan, 1.0, math.nan, 3.0, 2.0).svg())) == 1
    assert len(re.findall(mark, chart(0.0, 1.0, 0.0, log_y=True).svg())) == 1
    assert not re.findall(mark, chart(1.0, 2.0).svg())


def test_ticks_are_where_values_can_be() -> None:
    """Law: no tick is between two steps; of one step or one value, it is the tick.

    The numbers of values that hardly differ are whole numbers, not offsets.
    """

    def ticks(x: list[float], y: list[float], *, log_y: bool = False) -> list[str]:
        curve = Curve("", tuple(x), tuple(y))
        return words(Chart("t", "", "", (curve,), log_y=log_y).svg())

    assert ticks([6.0], [0.75]) == ["6", "0.75"]
    assert ticks([6.0], [0.75], log_y=True) == ["6", "0.75"]
    assert ticks([0.5], [65536.0] * 1) == ["0.5", "65536"]
    assert ticks([1.0, 2.0, 3.0], [5e-4] * 3) == ["1", "2", "3", "0.0005"]
    near = ticks([1.0, 2.0], [0.700001, 0.700002])
    assert near[:2] == ["1", "2"]
    assert all(0.7 < float(tick) < 0.70001 for tick in near[2:])


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
@given(anything, st.booleans(), st.booleans(), st.integers(1, 4))
def test_any_values_can_be_drawn(
    y: tuple[float, ...], log_y: bool, step: bool, mean_over: int
) -> None:
    """Law: no list of floats, the empty one included, warns or fails."""
    svg = chart(*y, log_y=log_y, step=step, mean_over=mean_over).svg()
    ET.fromstring(svg)  # noqa: S314


def test_long_curves_keep_their_spikes_gaps_and_ends() -> None:
    """Law: a spike of a single point is drawn whichever points are left out."""
    y = [math.sin(i / 1000) for i in range(50_000)]
    y[12_345], y[23_456], y[34_567] = 9.0, -9.0, math.nan
    y[1], y[-2] = -2.0, 2.0  # so that neither end is the least or the greatest
    curve = Curve("a", tuple(map(float, range(50_000))), tuple(y))
    xs, ys = thinned(curve, lowest=-1e100)
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
    xs, ys = thinned(Curve("a", x, y), lowest=-1e100)
    assert len(xs) == len(ys)
    assert 1000 <= len(xs) <= 2000 if count > 2000 else tuple(xs) == x
    with pytest.raises(ValueError, match="shorter than"):
        thinned(Curve("a", (*x, 0.0), y), lowest=-1e100)


@pytest.fixture(scope="module")
def html() -> str:
    """Return a page with two tables and three charts, two of the same title."""
    charts = (chart(1.0, 2.0), chart(1.0, 3.0), chart(1.0, 2.0, title="Scale"))
    tables = (TABLE, Table("Nothing", ("only",), ()))
    sections = (
        Section("One", "Some text.", tables=tables),
        Section("Two", charts=charts),
    )
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
    assert "currentColor" in html  # texts and axes of charts
    assert not re.search("#000000|#ffffff|#fff;", html)


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


@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("<script>\"'&", "<script>\"'&"),
        ("a\n\t\x1b[31m\u202e\0\ud800b", r"a\n\t\x1b[31m\u202e\x00\ud800b"),
    ],
)
def test_page_shows_markup_as_text(mark: str, shown: str) -> None:
    """Law: no argument can add an element, a line break or a control character."""
    table = Table(mark, (mark,), ((mark,),), (mark,))
    drawn = Chart(mark, mark, mark, (Curve(mark, (0.0, 1.0), (0.0, 1.0)),))
    heat = ConfusionMatrix(Table(mark, (mark, "a"), ((mark, 1),), (mark,)), mark)
    parts = Section(mark, mark, (mark,), (table,), (heat,), (drawn,))
    html = page(mark, [parts], mark)
    # Page 3, section 3, table 4, heat 5, chart 1 and in its drawing 3.
    texts = [text.strip() for text in parsed(html).itertext()]
    assert texts.count(shown) == 19


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without matplotlib or jinja2 the message says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    assert refused(page, "t", [Section("s", charts=(chart(1.0, 2.0),))]) == (
        "report.html needs matplotlib and jinja2: "
        "install them with pip install 'halfstep[report]', or in a checkout pip "
        "install -e '.[report]'."
    )


CONFUSION = Table("On dev", ("truth", "a", "b & c"), (("a", 3, 1), ("b & c", 0, 0)))


def test_heat_is_a_table_with_names_of_rows_and_columns() -> None:
    """Law: a reader of tables finds every count under its two names."""
    matrices = (ConfusionMatrix(CONFUSION, "guess"),)
    root = parsed(page("t", [Section("s", confusion_matrices=matrices)]))
    heat = root.find(".//table")
    assert heat is not None
    scopes = [(th.get("scope"), th.text) for th in heat.iter("th")]
    across = [("col", "truth"), ("colgroup", "guess"), ("col", "a"), ("col", "b & c")]
    assert scopes == [*across, ("row", "a"), ("row", "b & c")]
    assert [td.text for td in heat.iter("td")] == ["3", "1", "0", "0"]
    assert [th.get("colspan") for th in heat.iter("th")].count("2") == 1


def test_heat_is_shaded_by_the_share_of_a_row() -> None:
    """Law: full shade for a whole row, none for zero or no count; agreement differs."""
    drawn = ConfusionMatrix(CONFUSION, "guess").shaded_rows()
    assert drawn == [
        ("a", [("3", "rgba(0,114,178,0.450)"), ("1", "rgba(213,94,0,0.150)")]),
        ("b & c", [("0", "rgba(213,94,0,0.000)"), ("0", "rgba(0,114,178,0.000)")]),
    ]
    table = Table("", ("truth", "a", "b"), (("a", None, 2),))
    assert ConfusionMatrix(table, "guess").shaded_rows() == [
        ("a", [("-", "rgba(0,114,178,0.000)"), ("2", "rgba(213,94,0,0.600)")])
    ]


def test_long_words_break_and_short_ones_do_not() -> None:
    """Law: only what is long may be broken; a long text gets room on a phone."""
    table = Table("", ("w", "x", "n"), (("short", "a" * 16, 1), ("a" * 61, "y", 2)))
    root = parsed(page("t", [Section("s", tables=(table,))]))
    kinds = [td.get("class") for td in root.iter("td")]
    assert kinds == ["short", "", "number", "long", "short", "number"]


def test_a_logarithmic_axis() -> None:
    """Law: what has no logarithm is left out; ticks are plain numbers."""
    svg = chart(0.01, 1.0, 0.0, 100.0, 1.0, log_y=True).svg()
    assert [line.count("M") for line in strokes(svg)] == [2]
    assert {"0.01", "1", "100"} <= set(words(svg))
    assert "$" not in "".join(words(chart(2.0, 3.0, log_y=True).svg()))
    ticks = words(
        chart(9000.0, 65536.0, log_y=True).svg()
    )  # between powers of ten, too
    assert {"10000", "60000"} <= set(ticks)
    assert not [tick for tick in ticks if "e" in tick and tick[0].isdigit()]

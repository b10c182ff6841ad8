"""The laws of `halfstep.reporting.table`: what is shown, and what is written."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.reporting.table import Cell, Table, printable, write_text

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
    """Law: what is no letter is shown escaped in each part; data hold it as it is.

    Joiners and wide blanks belong to words.
    """
    hostile, shown = "x\ty\x1b[31m\u2028\u202ez\0", r"x\ty\x1b[31m\u2028\u202ez\x00"
    table = Table(hostile, (hostile,), ((hostile,),), (hostile,))
    title, column, _, cell, note = table.text().split("\n")
    assert {title, column, cell, note} == {shown}
    assert json.loads(json.dumps(table.data()))["rows"] == [{hostile: hostile}]
    joined = "\u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f469 \u3000\xa0"
    assert printable(joined) == joined


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
def test_how_a_cell_is_shown(cell: Cell, digits: int, shown: str) -> None:
    """Law: a float has `digits` digits and no minus zero, None is -, a bool a word."""
    table = Table("", ("a",), ((cell,),), digits=digits)
    assert table.text().split("\n")[-1].strip() == shown


def test_combining_letters_take_no_column() -> None:
    """Law: an accent of its own code point does not widen a column."""
    table = Table("", ("ab", "c"), (("e\u0301", "x"),))
    assert table.text().split("\n")[-1] == "e\u0301   x"


def test_printed_and_in_a_notebook() -> None:
    """Law: printed, a table is its text; as HTML it says the same, marks escaped."""
    assert str(TABLE) == repr(TABLE) == TABLE.text()
    long = Table("", ("number",), tuple((number,) for number in range(99)))
    assert str(long) == long.text()
    assert repr(long).splitlines()[-2:] == ["    19", "... and 79 more rows: print all"]
    hostile = Table("", ("a",), (("<b>&",),))._repr_html_()
    assert hostile == "<pre>a\n----\n&lt;b&gt;&amp;</pre>"


def test_data_is_json_and_tells_unmeasured_from_not_finite() -> None:
    """Law: strict JSON holds it; None is null, nan and infinities are strings."""
    table = Table("t", ("a", "b"), ((math.nan, -math.inf), (None, 1 / 3)), ("note",))
    assert json.loads(json.dumps(table.data(), allow_nan=False)) == {
        "title": "t",
        "columns": ["a", "b"],
        "rows": [{"a": "nan", "b": "-inf"}, {"a": None, "b": 1 / 3}],
        "notes": ["note"],
    }


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

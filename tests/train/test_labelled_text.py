"""Files of labelled text: what is read, and from which line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.train.data.labelled_text import Columns, Row, is_number, read

texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
).filter(str.strip)
words = texts.map(str.strip).filter(lambda word: not word.lstrip("-").isdigit())


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the path as given; a relative one makes them whole literals."""
    monkeypatch.chdir(tmp_path)


def rows_of(name: str, content: str | bytes) -> list[Row]:
    """Write a file and read it."""
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read(path))


def brief(rows: list[Row]) -> list[tuple[str, str, int]]:
    """Return text, label and line of each row."""
    return [(row.text, row.label_word, row.line) for row in rows]


GOOD = [("so good", "like", 2), ("so bad, so sad", "sad", 4)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[\n["so good", "like"],\n\n["so bad, so sad", "sad"]]'),
        (
            "a.json",
            (
                '\n [{"text": "so good", "label": "like", "id": 1}\n,\n'
                '{"label": " sad ", "text": "so bad, so sad"}\n]\n'
            ),
        ),
        (
            "a.jsonl",
            '\n{"text": "so good", "label": "like"}\n \n["so bad, so sad", "sad"]\n\n',
        ),
        ("A.NDJSON", '\n["so good", "like"]\r\n\r\n["so bad, so sad", "sad"]\r\n'),
        ("a.csv", 'text,label\nso good,like\n\n"so bad, so sad",sad\n'),
        ("a.csv", '\r\nso good,like\r\n  \r\n"so bad, so sad", sad\r\n'),
        ("a.csv", 'id,Label ,Text\r0,like,so good\r\r1,sad,"so bad, so sad"'),
        ("a.tsv", "label\ttext\nlike\tso good\n\nsad\tso bad, so sad\n"),
        ("a.tsv", "\nso good\tlike\t7\n\nso bad, so sad\tsad\t8\n"),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_form_reads_alike(name: str, content: str, mark: bytes) -> None:
    """Law: format, order of columns, blank lines and a BOM change no row or line."""
    assert brief(rows_of(name, mark + content.encode())) == GOOD


def test_a_row_knows_where_it_stands() -> None:
    """Law: `where` is file and line; in an array also the entry."""
    array = rows_of("a.json", '[["x", 0], ["y", 1],\n ["z", 2]]')
    assert [row.where for row in array] == [
        "a.json line 1 entry 1",
        "a.json line 1 entry 2",
        "a.json line 2 entry 3",
    ]
    (row,) = rows_of("a.csv", "\n\nx,0\n")
    assert row == Row("x", "0", 3, "a.csv line 3")


def test_a_row_over_several_lines_begins_at_its_first() -> None:
    """Law: a quoted newline or a pretty-printed entry shifts the rows after it."""
    table = 'text,label\n"two\nlines",a\none,b\n'
    assert brief(rows_of("a.csv", table)) == [("two\nlines", "a", 2), ("one", "b", 4)]
    array = json.dumps([["x\n", "a"], ["y", "b"]], indent=1)
    assert brief(rows_of("a.json", array)) == [("x\n", "a", 2), ("y", "b", 6)]


def test_a_line_separator_inside_json_does_not_end_a_line() -> None:
    """Law: U+2028, U+0085 and form feed are characters of a text, not line ends."""
    line = '["a\u2028b\u0085c", "x"]\n'
    assert brief(rows_of("a.jsonl", line * 2)) == [
        ("a\u2028b\u0085c", "x", 1),
        ("a\u2028b\u0085c", "x", 2),
    ]


@pytest.mark.parametrize(
    ("label", "word", "number"),
    [
        ("3", "3", True),
        ('"3"', "3", True),
        ('" 003 "', "3", True),
        ("-1", "-1", True),
        ('"-0"', "0", True),
        ('"+3"', "+3", False),
        ('"3.0"', "3.0", False),
        ('"\\uff13"', "\uff13", False),
        ('"1234567890123456789"', "1234567890123456789", False),
        ('"like"', "like", False),
    ],
)
def test_whole_numbers_are_told_from_words(
    label: str, word: str, *, number: bool
) -> None:
    """Law: only ASCII decimal integers are numbers, and each has one form."""
    (row,) = rows_of("a.jsonl", f'["x", {label}]')
    assert (row.label_word, is_number(row.label_word)) == (word, number)


@given(st.lists(st.tuples(texts, words), min_size=1), st.sampled_from([None, 1]))
@settings(max_examples=40, deadline=None)
def test_json_reads_what_json_writes(
    pairs: list[tuple[str, str]], indent: int | None
) -> None:
    """Law: an array, plain or indented, and its lines read as the json module does."""
    objects = [{"text": text, "label": word} for text, word in pairs]
    array = rows_of("a.json", json.dumps(objects, indent=indent))
    lines = rows_of(
        "a.jsonl", "\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs)
    )
    assert [(row.text, row.label_word) for row in array] == pairs
    assert [(row.text, row.label_word) for row in lines] == pairs
    # Indented by 1, an object takes four lines, after the bracket that opens.
    first, step = (2, 4) if indent else (1, 0)
    assert [row.line for row in array] == [
        first + step * entry for entry in range(len(pairs))
    ]
    assert [row.line for row in lines] == [line + 1 for line in range(len(pairs))]


@given(st.lists(st.tuples(texts, words), min_size=1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_tables_read_what_csv_writes(
    pairs: list[tuple[str, str]],
    tabs: bool,
) -> None:
    """Law: a table written by the csv module comes back, quotes and newlines too."""
    name, delimiter = ("a.tsv", "\t") if tabs else ("a.csv", ",")
    with Path(name).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerows([("text", "label"), *pairs])
    assert [(row.text, row.label_word) for row in read(Path(name))] == pairs


def test_forty_thousand_pairs_on_one_line() -> None:
    """Law: a large array on one line reads to its end; a quadratic reader hangs."""
    pairs = [[f"number {number} " * 5, number % 6] for number in range(40_000)]
    rows = rows_of("a.json", json.dumps(pairs))
    assert [(row.text, int(row.label_word)) for row in rows] == [
        (text, label) for text, label in pairs
    ]
    assert rows[-1].where == "a.json line 1 entry 40000"


def test_a_cell_may_be_long() -> None:
    """Law: a text longer than what csv takes by itself is read whole."""
    text = "x, " * 100_000
    assert brief(rows_of("a.csv", f'text,label\n"{text}",1\n')) == [(text, "1", 2)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_rows_come_before_the_file_is_read(name: str) -> None:
    """Law: no more of a file is held than its next row needs."""
    good = '["x,y", "1"]\n' if name == "a.jsonl" else "x,y\n"
    Path(name).write_bytes((good * 100_000).encode() + b"\xff\n")
    rows = read(Path(name))
    assert next(rows).line == 1
    with pytest.raises(UserError, match=f"{name} line 100001 is not UTF-8"):
        list(rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,Stars,review ,text\n7,1,so good,no\n8,2,so bad,no\n"),
        ("a.tsv", "review\tstars\nso good\t1\nso bad\t2\n"),
        (
            "a.jsonl",
            (
                '{"review": "so good", "stars": 1, "label": 9}\n'
                '{"review": "so bad", "stars": "2", "text": 0}\n'
            ),
        ),
        (
            "a.json",
            '[{"stars": 1, "review": "so good"},\n{"stars": 2, "review": "so bad"}]',
        ),
    ],
)
def test_columns_are_read_by_their_names(name: str, content: str) -> None:
    """Law: columns and keys that are named are read, and no others."""
    Path(name).write_text(content, encoding="utf-8")
    rows = read(Path(name), Columns("review", "stars"))
    assert [row[:2] for row in rows] == [("so good", "1"), ("so bad", "2")]


LABELS = {
    "1": "1",
    "-0": "0",
    "007": "7",
    "4.5": "4.5",
    "4.0": "4.0",
    "true": "true",
    "sad": "sad",
    "12345678901234567890": "12345678901234567890",
}
"""A label as a file spells it, and its word."""


@pytest.mark.parametrize("spelt", LABELS)
def test_a_label_is_the_same_in_every_format(spelt: str) -> None:
    """Law: a label is one word, in a table, in a string of JSON, and bare in JSON."""
    forms = [("a.csv", f"x,1\ny,{spelt}\n"), ("a.jsonl", f'["x", 1]\n["y", "{spelt}"]')]
    if spelt not in {"007", "sad"}:  # no values of JSON
        forms += [
            ("b.jsonl", f'["x", 1]\n["y", {spelt}]'),
            ("c.json", f'[["y", {spelt}]]'),
        ]
    for name, content in forms:
        assert rows_of(name, content)[-1].label_word == LABELS[spelt], name


def test_labels_of_other_types_are_told_apart() -> None:
    """Law: 1, true and 1.0, which Python holds for equal, are three labels."""
    content = '["x", 1]\n["x", true]\n["x", 1.0]\n["x", 1]\n'
    words = [row.label_word for row in rows_of("a.jsonl", content)]
    assert words == ["1", "true", "1.0", "1"]

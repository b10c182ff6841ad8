"""Files of labelled text: what is read, from which line, and each refusal in full."""

import csv
import json
from pathlib import Path

import pytest
from data_files import cells, in_tmp_path, refused, write  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.train.data.example_store import open_store
from halfstep.train.data.labelled_text import Columns, Row, read

texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
).filter(str.strip)
words = texts.map(str.strip).filter(lambda word: not word.lstrip("-").isdigit())


def brief(rows: list[Row]) -> list[tuple[str, str, int]]:
    return [(row.text, row.label_word, row.line) for row in rows]


def rows_of(name: str, content: str | bytes) -> list[Row]:
    return list(read(write(name, content)))


GOOD = [("so good", "like", 2), ("so bad, so sad", "sad", 4)]
LINES = '\n{"text": "so good", "label": "like"}\n \n["so bad, so sad", "sad"]\n\n'
OBJECTS = (
    '\n [{"text": "so good", "label": "like", "id": 1}\n,\n'
    '{"label": " sad ", "text": "so bad, so sad"}\n]\n'
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[\n["so good", "like"],\n\n["so bad, so sad", "sad"]]'),
        ("a.json", OBJECTS),
        ("a.jsonl", LINES),
        ("A.NDJSON", '\n["so good", "like"]\r\n\r\n["so bad, so sad", "sad"]\r\n'),
        ("a.csv", 'text,label\nso good,like\n\n"so bad, so sad",sad\n'),
        ("a.csv", '\r\nso good,like\r\n  \r\n"so bad, so sad", sad\r\n'),
        ("a.csv", 'id,Label ,Text\n0,like,so good\n\n1,sad,"so bad, so sad"'),
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
    two, row = rows_of("a.csv", '\n\n"two\nlines",a\nx,0\n')
    assert brief([two]) == [("two\nlines", "a", 3)]
    assert row == Row("x", "0", 5, "a.csv line 5")


@given(st.lists(st.tuples(texts, words), min_size=1), st.sampled_from([None, 1]))
@settings(max_examples=40)
def test_json_reads_what_json_writes(
    pairs: list[tuple[str, str]], indent: int | None
) -> None:
    """Law: an array, plain or indented, and its lines read as the json module does.

    Indented by 1, an object takes four lines, after the bracket that opens.
    """
    objects = [{"text": text, "label": word} for text, word in pairs]
    dumped = [json.dumps(pair, ensure_ascii=False) for pair in pairs]
    first, step = (2, 4) if indent else (1, 0)
    for name, content, at, by in (
        ("a.json", json.dumps(objects, indent=indent), first, step),
        ("a.jsonl", "\n".join(dumped), 1, 1),
    ):
        expected = [(*pair, at + by * n) for n, pair in enumerate(pairs)]
        assert brief(rows_of(name, content)) == expected


@given(st.lists(st.tuples(texts, words), min_size=1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_tables_read_what_csv_writes(pairs: list[tuple[str, str]], tabs: bool) -> None:
    """Law: a table written by the csv module comes back, quotes and newlines too."""
    name, delimiter = ("a.tsv", "\t") if tabs else ("a.csv", ",")
    with Path(name).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerows([("text", "label"), *pairs])
    assert [(row.text, row.label_word) for row in read(Path(name))] == pairs


def test_a_cell_may_be_long() -> None:
    """Law: a text longer than what csv takes by itself is read whole."""
    text = "x, " * 100_000
    assert brief(rows_of("a.csv", f'text,label\n"{text}",1\n')) == [(text, "1", 2)]


def test_rows_come_before_the_file_is_read() -> None:
    """Law: no more of a file is held than its next row needs."""
    for name, good in (("a.jsonl", '["x,y", "1"]\n'), ("a.csv", "x,y\n")):
        Path(name).write_bytes((good * 20_000).encode() + b"\xff\n")
        rows = read(Path(name))
        assert next(rows).line == 1
        with pytest.raises(UserError, match=f"{name} line 20001 is not UTF-8"):
            list(rows)


REVIEWS = (
    '{"review": "so good", "stars": 1, "label": 9}\n'
    '{"review": "so bad", "stars": "2", "text": 0}\n'
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,Stars,review ,text\n7,1,so good,no\n8,2,so bad,no\n"),
        ("a.tsv", "review\tstars\nso good\t1\nso bad\t2\n"),
        ("a.jsonl", REVIEWS),
    ],
)
def test_columns_are_read_by_their_names(name: str, content: str) -> None:
    """Law: columns and keys that are named are read, and no others."""
    rows = read(write(name, content), Columns("review", "stars"))
    assert [row[:2] for row in rows] == [("so good", "1"), ("so bad", "2")]


LABELS = {"1": "1", "-0": "0", "007": "7", "4.5": "4.5", "4.0": "4.0", "true": "true"}
LABELS |= {word: word for word in ("sad", "12345678901234567890")}
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


FORM = 'each line holds {"text": "...", "label": ...}.'
NO_TEXT = "is not a text and its label; each line holds {"
LONG = f'"{"x" * 50}"'
BAD_LINES = rf"""
{{"text": "x"}} | {{"text": "x"}} {NO_TEXT}
["x", 1, 2] | ["x", 1, 2] {NO_TEXT}
{LONG} | "{"x" * 39}... {NO_TEXT}
["\\u738b\u200b\\ud83d\\n"] | ["\u738b\\u200b\\ud83d\\n"] {NO_TEXT}
[17, 1] | text is 17; a text is a string.
["\u3000", 1] | text is blank; give it words or drop the row.
["x", NaN] | label is NaN; a label is a number or a word.
["x", " "] | label is blank; a label is
["x", "\\ude00"] | a character is cut in half (a lone surrogate)
["ab", "b\\u0000"] | it holds a NUL character; remove it.
{{"\u738b": "x", "text": "y", "\u738b": "x"}} | key "\u738b" appears twice in one object
"""


@pytest.mark.parametrize(("line", "fault"), cells(BAD_LINES))
def test_a_bad_entry_is_refused(line: str, fault: str) -> None:
    """Law: a row that is no text and label names its line, the fault and the cure."""
    told = refused(rows_of, "a.jsonl", f'["fine", 0]\n\n{line}\n')
    assert told.startswith(f"a.jsonl line 3: {fault}")


BROKEN = r"""
a.json | [["x", 1]\n ["y", 2]] | 2 column 2: broken JSON: Expecting ',' or ']'
a.json | [["x", 1],\n["y" 2]] | 2 column 6: broken JSON: Expecting ',' delimiter
a.json | [["x", 1]]\n\n [] | 3 column 2: broken JSON: Extra data after the array
a.json | {"text": "x", "label": 1}\n | 1 column 1: broken JSON: Expecting [ and all en
a.jsonl | ["x", 1] ["y", 2] | 1 column 10: broken JSON: Extra data after the value
a.jsonl | {"text": "x",\n "label": 1}\n | 1 column 14: broken JSON: Expecting prop
a.csv | text,label\nx,1\n\ny\n | 4: cell count is 1, but 2 in line 1; quote a text th
a.tsv | \nx\t1\ny\t\t1\n | 3: cell count is 3, but 2 in line 2; quote a text
a.csv | x\ny\n | 1: text and label are two columns; begin with a header row
a.csv | sentence,label\nx,sad\n | 1: text and label are two columns
a.csv | text,label\nx,\n | 2: label is blank
a.csv | x,1\n"y,2\nz,3\n | 2: unexpected end of data; end lines with line feeds
a.csv | text,label,Text \nx,1,y\n | 1: 2 columns are named 'text'; rename all but
a.csv | text;label\nx;y;z,1\n | 1: cells are separated by ';'; save it with ','
a.tsv | text,label\nx;y;z,1\n | 1: cells are separated by ','; save it with '\\t'
a.tsv | x\t1\ny\0\t2\n | 2 holds a NUL byte; save it as UTF-8
"""


@pytest.mark.parametrize(("name", "content", "fault"), cells(BROKEN))
def test_a_broken_file_is_located(name: str, content: str, fault: str) -> None:
    """Law: what does not fit JSON or its table is located, lines counted from 1."""
    assert refused(rows_of, name, content).startswith(f"{name} line {fault}")


ACCEPTED = ".json, .jsonl, .ndjson, .csv or .tsv"
NOT_UTF8 = " line {} is not UTF-8: byte 0x{} at offset {}; save it as UTF-8."


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a", "x", f": suffix '' is unknown; save it as {ACCEPTED}."),
        ("a.csv", b"x,1\ny,2\n\xba\xc3,3\n", NOT_UTF8.format(3, "ba", 8)),
        ("a.csv", b"\xef\xbb\xbfx,\xff\n", NOT_UTF8.format(1, "ff", 5)),
        ("a.json", "[" * 100_000, " line 1 column 2: broken JSON: a number is too lo"),
        ("a.json", " [ ]\n", " holds no rows; each entry is"),
        ("a.jsonl", "\n \n", f" holds no rows; {FORM}"),
        ("a.csv", "", " holds no rows; each row holds a text and a"),
        ("a.csv", "text,label\n", " holds no rows; each row holds a text and a"),
    ],
)
def test_a_bad_file_is_refused(name: str, content: str | bytes, fault: str) -> None:
    """Law: a file that holds no readable rows says why, and how to save it."""
    assert refused(rows_of, name, content).startswith(name + fault)


def test_a_text_file_is_for_entities() -> None:
    """Law: a .txt file for classes is refused with the forms that hold labels."""
    line = refused(open_store, write("notes.txt", "a b"), "classify", None)
    assert line.startswith("notes.txt: .txt is for --task ner; save it as .tsv (a te")


NOT_THERE = r"""
a.csv | id, Reviews,stars\n1,2,3\n | line 1: no column is named 'review' in ["id
a.tsv | \nreview\nx\n | line 2: no column is named 'stars' in\x20
a.csv | Review,review,stars\nx,y,1\n | line 1: 2 columns are named\x20
a.json | [["x", 1]] | line 1 entry 1: ["x", 1] lacks 'review';\x20
a.jsonl | {"review": 1, "star": 1} | line 1: {"review": 1, "star": 1} lac
"""


@pytest.mark.parametrize(("name", "content", "message"), cells(NOT_THERE))
def test_columns_that_are_not_there(name: str, content: str, message: str) -> None:
    """Law: a column that was named and is not there is refused, with those that are."""
    path = write(name, content)
    fault = refused(lambda: list(read(path, Columns("review", "stars"))))
    assert fault.startswith(f"{name} {message}")
    assert ("; nearest: 'Reviews'; " in fault) == ("Reviews" in content)
    assert ("lacks 'stars'; nearest: 'star'; " in fault) == ('"star"' in content)

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
ARRAY_FORM = 'each entry is ["text", label] or {"text": "...", "label": ...}.'
CUT = "a character is cut in half (a lone surrogate); fix or drop it."
WANG = "\u738b" * 50
ODD = "\u738b\\u200b\\ud83d\\n"
RAW = "\\u738b\u200b\\ud83d\\n"
NO_LABEL = "a label is a number or a word."


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"text": "x"}', f'{{"text": "x"}} is not a text and its label; {FORM}'),
        ("{}", f"{{}} is not a text and its label; {FORM}"),
        ('["x"]', f'["x"] is not a text and its label; {FORM}'),
        ('["x", 1, 2]', f'["x", 1, 2] is not a text and its label; {FORM}'),
        ("17", f"17 is not a text and its label; {FORM}"),
        (f'"{"x" * 50}"', f'"{"x" * 39}... is not a text and its label; {FORM}'),
        (f'["{RAW}"]', f'["{ODD}"] is not a text and its label; {FORM}'),
        (f'["{WANG}"]', f'["{WANG[:38]}... is not a text and its label; {FORM}'),
        ("[17, 1]", "text is 17; a text is a string."),
        ("[null, 1]", "text is null; a text is a string."),
        ('["", 1]', "text is blank; give it words or drop the row."),
        ('[" \\n\\u3000", 1]', "text is blank; give it words or drop the row."),
        ('["x", null]', f"label is null; {NO_LABEL}"),
        ('["x", NaN]', f"label is NaN; {NO_LABEL}"),
        ('["x", [1, 2]]', f"label is [1, 2]; {NO_LABEL}"),
        ('["x", " "]', f"label is blank; {NO_LABEL}"),
        ('["so good \\ud83d", 1]', CUT),
        ('["so good", "\\ude00"]', CUT),
        ('["a\\u0000b", 1]', "it holds a NUL character; remove it."),
        ('["ab", "b\\u0000"]', "it holds a NUL character; remove it."),
    ],
)
def test_a_bad_entry_is_refused(line: str, fault: str) -> None:
    """Law: a row that is no text and label names its line, the fault and the cure."""
    content = '["fine", 0]\n\n' + line + "\n"
    assert refused(rows_of, "posts.jsonl", content) == f"posts.jsonl line 3: {fault}"


def test_a_key_twice_is_refused() -> None:
    """Law: an object with a key twice is refused, at its line, whatever the key."""
    for key in ("text", "label", "\u738b", "id"):
        entry = f'{{"{key}": "x", "text": "y", "label": 0, "{key}": "x"}}'
        line = f'line 3: key "{key}" appears twice in one object; keep one of them.'
        assert (
            refused(rows_of, "a.jsonl", f'["fine", 0]\n\n{entry}\n')
            == f"a.jsonl {line}"
        )
        assert (
            refused(rows_of, "a.json", f'[["fine\\n", 0],\n\n{entry}]')
            == f"a.json {line}"
        )


def test_a_bad_entry_of_an_array_is_numbered() -> None:
    """Law: in an array the line is that of the entry, and the entry is counted."""
    content = '[["a\\n", 0], ["b", 1],\n\n  ["c"]]'
    assert refused(rows_of, "posts.json", content) == (
        f'posts.json line 3 entry 3: ["c"] is not a text and its label; {ARRAY_FORM}'
    )


NO_ARRAY = "Expecting [ and all entries; one entry a line is .jsonl"
TOO_LONG = "a number is too long or the nesting too deep"
NO_NAME = "Expecting property name enclosed in double quotes"


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("a.json", '[["x", 1]\n ["y", 2]]', (2, 2), "Expecting ',' or ']'"),
        ("a.json", '[["x", 1],\n["y" 2]]', (2, 6), "Expecting ',' delimiter"),
        ("a.json", '[["x", 1],\n]', (2, 1), "Expecting value"),
        ("a.json", '[["x", 1],', (1, 11), "Expecting value"),
        ("a.json", '[["x", 1]', (1, 10), "Expecting ',' or ']'"),
        ("a.json", '[["x", 1]]\n\n []', (3, 2), "Extra data after the array"),
        ("a.json", '{"text": "x", "label": 1}\n', (1, 1), NO_ARRAY),
        ("a.json", "", (1, 1), NO_ARRAY),
        ("a.json", "[" * 100_000, (1, 2), TOO_LONG),
        ("a.jsonl", '["x", 1]\n["x", ' + "9" * 5_000 + "]", (2, 1), TOO_LONG),
        ("a.jsonl", '["x", 1]\n["y", 2', (2, 8), "Expecting ',' delimiter"),
        ("a.jsonl", '["x", 1] ["y", 2]', (1, 10), "Extra data after the value"),
        ("a.jsonl", '{"text": "x",\n "label": 1}\n', (1, 14), NO_NAME),
    ],
)
def test_broken_json_is_located(
    name: str, content: str, place: tuple[int, int], fault: str
) -> None:
    """Law: broken JSON names line and column, counted from 1 over the whole file."""
    line, column = place
    assert refused(rows_of, name, content) == (
        f"{name} line {line} column {column}: broken JSON: {fault}."
    )


QUOTES = (
    "end lines with line feeds, and a cell that begins with a quote with one; a quote "
    "inside it is written twice."
)
HEADER = (
    "text and label are two columns; begin with a header row that names them, or give "
    "--text-column and --label-column."
)
SEE = "see --text-column and --label-column."
TWO_COLUMNS = "{} columns are named '{}'; rename all but one."
BLANK = "text is blank; give it words or drop the row."


def uneven(count: int, head: int, line: int, delimiter: str) -> str:
    """Return the fault of a row whose cells are not as many as in the first."""
    return (
        f"cell count is {count}, but {head} in line {line}; "
        f"quote a text that holds {delimiter}, or fill up the row."
    )


@pytest.mark.parametrize(
    ("name", "content", "line", "fault"),
    [
        ("a.csv", "text,label\nx,1\n\ny\n", 4, uneven(1, 2, 1, "','")),
        ("a.csv", "text,label\nwell, well,1\n", 2, uneven(3, 2, 1, "','")),
        ("a.tsv", "\nx\t1\ny\t\t1\n", 3, uneven(3, 2, 2, r"'\t'")),
        ("a.csv", "x\ny\n", 1, HEADER),
        ("a.csv", "sentence,label\nx,sad\n", 1, HEADER),
        ("a.csv", "\nText,emotion\nx,sad\n", 2, HEADER),
        ("a.csv", "text,label\nx,\n", 2, f"label is blank; {NO_LABEL}"),
        ("a.csv", "text,label\n ,1\n", 2, BLANK),
        ("a.csv", 'x,1\n"y,2\nz,3\n', 2, f"unexpected end of data; {QUOTES}"),
        ("a.csv", '"so" he,1\n', 1, f"',' expected after '\"'; {QUOTES}"),
        ("a.csv", "text,label,Text \nx,1,y\n", 1, TWO_COLUMNS.format(2, "text")),
        ("a.tsv", "\nlabel\tlabel\ttext\tlabel\n", 2, TWO_COLUMNS.format(3, "label")),
    ],
)
def test_a_bad_table_is_refused(name: str, content: str, line: int, fault: str) -> None:
    """Law: a row that does not fit its table names its line, the fault and the cure."""
    assert refused(rows_of, name, content) == f"{name} line {line}: {fault}"


def test_another_separator_is_named() -> None:
    """Law: a table with other separators is refused with both, whatever its columns."""
    of_csv, of_tsv = ("a.csv", "text;label", "','"), ("a.tsv", "text,label", "'\\t'")
    for name, head, own in (of_csv, of_tsv):
        path = write(name, f"{head}\nx;y;z,1\n")
        for columns in (Columns(), Columns("review", "stars")):
            assert refused(lambda p=path, c=columns: list(read(p, c))) == (
                f"{name} line 1: cells are separated by {head[4]!r}; save it with "
                f"{own}, as a {name[1:]} file has it."
            )


ACCEPTED = ".json, .jsonl, .ndjson, .csv or .tsv"


NO_ROWS = " holds no rows; each row holds a text and a label."
NOT_UTF8 = " line {} is not UTF-8: byte 0x{} at offset {}; save it as UTF-8."


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a", "x", f": suffix '' is unknown; save it as {ACCEPTED}."),
        ("a.csv", b"x,1\ny,2\n\xba\xc3,3\n", NOT_UTF8.format(3, "ba", 8)),
        ("a.csv", b"\xef\xbb\xbfx,\xff\n", NOT_UTF8.format(1, "ff", 5)),
        ("a.csv", b"\xff\xfet\0e\0x\0t\0", NOT_UTF8.format(1, "ff", 0)),
        ("a.tsv", b"x\t1\ny\0\t2\n", " line 2 holds a NUL byte; save it as UTF-8 pl"),
        ("a.json", " [ ]\n", f" holds no rows; {ARRAY_FORM}"),
        ("a.jsonl", "\n \n", f" holds no rows; {FORM}"),
        ("a.ndjson", "", f" holds no rows; {FORM}"),
        ("a.csv", "", NO_ROWS),
        ("a.csv", "\n\n", NO_ROWS),
        ("a.tsv", "text\tlabel\n", NO_ROWS),
    ],
)
def test_a_bad_file_is_refused(name: str, content: str | bytes, fault: str) -> None:
    """Law: a file that holds no readable rows says why, and how to save it."""
    assert refused(rows_of, name, content).startswith(name + fault)


def test_a_text_file_is_for_entities() -> None:
    """Law: a .txt file for classes is refused with the forms that hold labels."""
    line = refused(open_store, write("notes.txt", "a b"), "classify", None)
    assert line == (
        "notes.txt: .txt is for --task ner; save it as .tsv (a text, a tab and its "
        f"label in each line), or as {ACCEPTED}."
    )


NOT_THERE = r"""
a.csv | id,stars\n1,2\n | line 1: no column is named 'review' in ["id", "stars
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
    assert fault.endswith((SEE, "rename all but one."))

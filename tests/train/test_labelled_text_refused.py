"""Files of labelled text that are refused: each message in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import UserError
from halfstep.train.data.labelled_text import Columns, read

LONGEST_MESSAGE = 35


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the path as given; a relative one makes them whole literals."""
    monkeypatch.chdir(tmp_path)


def refusal(name: str, content: str | bytes) -> str:
    """Return the message that refuses a file, checked for its form."""
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        list(read(path))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message.split()) <= LONGEST_MESSAGE
    return message


FORM = 'each line holds {"text": "...", "label": ...}.'
ARRAY_FORM = 'each entry is ["text", label] or {"text": "...", "label": ...}.'
CUT = "a character is cut in half (a lone surrogate); fix or drop the row."
WANG = "\u738b" * 50
NO_LABEL = "a label is a number or a word."


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"text": "x"}', f"label is missing; {FORM}"),
        ('{"label": 1}', f"text is missing; {FORM}"),
        ("{}", f"text is missing; {FORM}"),
        ('["x"]', f'["x"] is not a text and its label; {FORM}'),
        ('["x", 1, 2]', f'["x", 1, 2] is not a text and its label; {FORM}'),
        ("17", f"17 is not a text and its label; {FORM}"),
        (
            '"' + "x" * 50 + '"',
            f'"{"x" * 39}... is not a text and its label; {FORM}',
        ),
        (
            '["\\u738b\u200b\\ud83d\\n"]',
            f'["\u738b\\u200b\\ud83d\\n"] is not a text and its label; {FORM}',
        ),
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
    ],
)
def test_a_bad_entry_is_refused(line: str, fault: str) -> None:
    """Law: a row that is no text and label names its line, the fault and the cure."""
    content = '["fine", 0]\n\n' + line + "\n"
    assert refusal("posts.jsonl", content) == f"posts.jsonl line 3: {fault}"


@pytest.mark.parametrize("key", ["text", "label", "\u738b", "id"])
def test_a_key_twice_is_refused(key: str) -> None:
    """Law: an object with a key twice is refused, at its line, whatever the key."""
    entry = f'{{"{key}": "x", "text": "y", "label": 0, "{key}": "x"}}'
    fault = f'key "{key}" appears twice in one object; keep one of them.'
    assert refusal("a.jsonl", f'["fine", 0]\n\n{entry}\n') == f"a.jsonl line 3: {fault}"
    array = f'[["fine\\n", 0],\n\n{entry}]'
    assert refusal("a.json", array) == f"a.json line 3: {fault}"


def test_a_bad_entry_of_an_array_is_numbered() -> None:
    """Law: in an array the line is that of the entry, and the entry is counted."""
    content = '[["a\\n", 0], ["b", 1],\n\n  ["c"]]'
    assert refusal("posts.json", content) == (
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
    assert refusal(name, content) == (
        f"{name} line {line} column {column}: broken JSON: {fault}."
    )


QUOTES = (
    "a cell that begins with a quote must end with one, and a quote inside it is "
    "written twice."
)
HEADER = (
    "text and label are two columns; begin with a header row that names them, or give "
    "--text-column and --label-column."
)
SEE = "see --text-column and --label-column."
TWO_COLUMNS = "{} columns are named '{}'; rename all but one."
BLANK = "text is blank; give it words or drop the row."


def cells(count: int, head: int, line: int, delimiter: str) -> str:
    """Return the fault of a row whose cells are not as many as in the first."""
    return (
        f"cell count is {count}, but {head} in line {line}; "
        f"quote a text that holds {delimiter}, or fill up the row."
    )


@pytest.mark.parametrize(
    ("name", "content", "line", "fault"),
    [
        ("a.csv", "text,label\nx,1\n\ny\n", 4, cells(1, 2, 1, "','")),
        ("a.csv", "text,label\nwell, well,1\n", 2, cells(3, 2, 1, "','")),
        ("a.tsv", "\nx\t1\ny\t\t1\n", 3, cells(3, 2, 2, r"'\t'")),
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
    assert refusal(name, content) == f"{name} line {line}: {fault}"


ACCEPTED = ".json, .jsonl, .ndjson, .csv or .tsv"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", "x", f": suffix '.txt' is unknown; save it as {ACCEPTED}."),
        ("a", "x", f": suffix '' is unknown; save it as {ACCEPTED}."),
        (
            "a.csv",
            b"x,1\ny,2\n" + "\u597d,3\n".encode("gbk"),
            " line 3 is not UTF-8: byte 0xba at offset 8; save it as UTF-8.",
        ),
        (
            "a.csv",
            b"\xef\xbb\xbfx,\xff\n",
            " line 1 is not UTF-8: byte 0xff at offset 5; save it as UTF-8.",
        ),
        (
            "a.csv",
            b"\xff\xfe" + "text,label".encode("utf-16-le"),
            " line 1 is not UTF-8: byte 0xff at offset 0; save it as UTF-8.",
        ),
        (
            "a.tsv",
            b"x\t1\ny\0\t2\n",
            " line 2 holds a NUL byte; save it as UTF-8 plain text.",
        ),
        ("a.json", " [ ]\n", f" holds no rows; {ARRAY_FORM}"),
        ("a.jsonl", "\n \n", f" holds no rows; {FORM}"),
        ("a.ndjson", "", f" holds no rows; {FORM}"),
        ("a.csv", "", " holds no rows; each row holds a text and a label."),
        ("a.csv", "\n\n", " holds no rows; each row holds a text and a label."),
        (
            "a.tsv",
            "text\tlabel\n",
            " holds no rows; each row holds a text and a label.",
        ),
    ],
)
def test_a_bad_file_is_refused(name: str, content: str | bytes, fault: str) -> None:
    """Law: a file that holds no readable rows says why, and how to save it."""
    assert refusal(name, content) == name + fault


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "id,stars\n1,2\n",
            'line 1: no column is named \'review\', there are "id", "stars"; ',
        ),
        ("a.tsv", "\nreview\nx\n", "line 2: no column is named 'stars', there are "),
        ("a.csv", "Review,review,stars\nx,y,1\n", "line 1: 2 columns are named "),
        (
            "a.jsonl",
            '{"review": "x", "text": "y"}',
            'line 1: key \'stars\' is missing, there are "review", "text"; ',
        ),
        ("a.json", '[["x", 1]]', "line 1 entry 1: [\"x\", 1] has no key 'review'; "),
        ("a.jsonl", "{}", "line 1: key 'review' is missing; "),
    ],
)
def test_columns_that_are_not_there(name: str, content: str, message: str) -> None:
    """Law: a column that was named and is not there is refused, with those that are."""
    Path(name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        list(read(Path(name), Columns("review", "stars")))
    assert str(caught.value).startswith(f"{name} {message}")
    assert str(caught.value).endswith((SEE, "rename all but one."))

"""Rows of labelled text from one file, each checked and able to say where it stands.

In: a .json, .jsonl, .ndjson, .csv or .tsv file. Out: `Row` values, or a `UserError`
that names the file, the line and the cure.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Where it stands, for messages; its line; text and label, still unchecked.
_Entry = tuple[str, int, object]

ACCEPTED = ".json, .jsonl, .ndjson, .csv or .tsv"

# More digits than these are a telephone number or a hash, so a word.
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_INK = re.compile(r"[^ \t\r\n]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON = json.JSONDecoder()
# Characters of a bad value that a message repeats.
_SHOWN = 40


@dataclass(frozen=True)
class Row:
    """One text and its label as a file holds them."""

    text: str
    """The text, unchanged and not blank."""
    label_word: str
    """The label without outer white space; a whole number in its shortest form."""
    line: int
    """Where the row begins in its file, counted from 1."""
    where: str
    """The same for messages: file, line and, in an array, the number of the entry."""

    @property
    def is_number(self) -> bool:
        """Whether the label is a whole number and not a word."""
        return _NUMBER.fullmatch(self.label_word) is not None


def read(path: Path) -> list[Row]:
    """Return the rows of one file; one bad row refuses the file.

    Why: a reader that skips what it does not understand trains on less than the user
    believes, or on a column that is not the label.

    Args:
        path: A UTF-8 file. The suffix tells the format: `.json` is one array of
            `[text, label]` pairs or objects, `.jsonl` and `.ndjson` one of these a
            line, `.csv` and `.tsv` a table. The header of a table names the columns
            `text` and `label`; without one they are the first two.

    Returns:
        At least one row, in the order of the file.

    Raises:
        UserError: If the file or one of its rows cannot be used.
    """
    suffix = path.suffix.lower()
    message = ""
    if not path.exists():
        message = f"{path} is not there; give a file or a directory that exists."
    elif path.is_dir():
        message = f"{path} is a directory; give one file, {ACCEPTED}."
    elif suffix not in FORMATS:
        message = f"{path}: suffix {path.suffix!r} is unknown; save it as {ACCEPTED}."
    if message:
        raise UserError(message)
    entries, form = FORMATS[suffix]
    rows = [_row(*entry, form) for entry in entries(path, _characters(path))]
    if not rows:
        message = f"{path} holds no rows; {form}."
        raise UserError(message)
    return rows


def _characters(path: Path) -> str:
    """Return what a UTF-8 file says, without a byte-order mark."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise UserError(message) from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = (
            f"{path} line {line} is not UTF-8: byte 0x{data[error.start]:02x} "
            f"at offset {error.start}; save it as UTF-8."
        )
        raise UserError(message) from error
    if (zero := text.find("\0")) >= 0:
        line = text.count("\n", 0, zero) + 1
        message = f"{path} line {line} holds a NUL byte; save it as UTF-8 plain text."
        raise UserError(message)
    return text.removeprefix("\ufeff")


def _row(where: str, line: int, entry: object, form: str) -> Row:
    """Return the row of one entry, which is a pair or an object."""
    text: object = None
    label: object = None
    fault = ""
    match entry:
        case {"text": text, "label": label} | [text, label]:
            fault = _fault(text, label)
        case {"text": _}:
            fault = f"label is missing; {form}"
        case {}:
            fault = f"text is missing; {form}"
        case _:
            fault = f"{_shown(entry)} is not a text and its label; {form}"
    if fault:
        message = f"{where}: {fault}."
        raise UserError(message)
    word = str(label).strip()
    if _NUMBER.fullmatch(word):
        word = str(int(word))
    return Row(str(text), word, line, where)


def _fault(text: object, label: object) -> str:
    """Return what is wrong with a text or a label; nothing if both are sound."""
    if not isinstance(text, str):
        return f"text is {_shown(text)}; a text is a string"
    if not text.strip():
        return "text is blank; give it words or drop the row"
    if isinstance(label, bool) or not isinstance(label, int | str):
        return f"label is {_shown(label)}; a label is a whole number or a word"
    if not str(label).strip():
        return "label is blank; a label is a whole number or a word"
    if _SURROGATE.search(f"{text}{label}"):
        return "a character is cut in half (a lone surrogate); mend or drop the row"
    return ""


def _shown(value: object) -> str:
    """Return a value as JSON writes it, cut to the length of a message."""
    whole = json.dumps(value)
    return whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}..."


def _array(path: Path, text: str) -> Iterator[_Entry]:
    """Yield the entries of one JSON array, decoded one by one to know their lines."""
    at = _after_space(text, 0)
    if not text.startswith("[", at):
        raise _broken(
            path, 1, text, at, "Expecting [ and all entries; one entry a line is .jsonl"
        )
    at = _after_space(text, at + 1)
    if text.startswith("]", at):
        return
    number, line, counted, closed = 0, 1, 0, False
    while not closed:
        number += 1
        line += text.count("\n", counted, at)
        counted = at
        entry, at = _value(path, 1, text, at)
        yield f"{path} line {line} entry {number}", line, entry
        at = _after_space(text, at)
        closed = text.startswith("]", at)
        if not closed and not text.startswith(",", at):
            raise _broken(path, 1, text, at, "Expecting ',' or ']'")
        at = _after_space(text, at + 1)
    if at < len(text):
        raise _broken(path, 1, text, at, "Extra data after the array")


def _lines(path: Path, text: str) -> Iterator[_Entry]:
    """Yield one JSON value a line."""
    # str.splitlines would also cut at U+2028, which may stand inside a JSON string.
    for line, content in enumerate(text.split("\n"), start=1):
        at = _after_space(content, 0)
        if at == len(content):
            continue
        entry, at = _value(path, line, content, at)
        at = _after_space(content, at)
        if at < len(content):
            raise _broken(path, line, content, at, "Extra data after the value")
        yield f"{path} line {line}", line, entry


def _value(path: Path, first: int, text: str, at: int) -> tuple[object, int]:
    """Return the JSON value at a place in the text, and the place after it."""
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _broken(path, first, text, error.pos, error.msg) from error
    except (ValueError, RecursionError) as error:
        fault = "a number is too long or the nesting too deep"
        raise _broken(path, first, text, at, fault) from error


def _broken(path: Path, first: int, text: str, at: int, fault: str) -> UserError:
    """Return the refusal of JSON that breaks at a place; the text begins at a line."""
    line = first + text.count("\n", 0, at)
    column = at - text.rfind("\n", 0, at)
    message = f"{path} line {line} column {column}: broken JSON: {fault}."
    return UserError(message)


def _after_space(text: str, at: int) -> int:
    """Return the place of the next character that is not JSON white space."""
    ink = _INK.search(text, at)
    return ink.start() if ink else len(text)


def _table(path: Path, text: str, *, delimiter: str) -> Iterator[_Entry]:
    """Yield text and label of each row of a table."""
    rows = _cells(path, text, delimiter)
    first = next(rows, None)
    if first is None:
        return
    line, head = first
    names = [cell.strip().lower() for cell in head]
    columns = (0, 1)
    if {"text", "label"} <= set(names):
        columns = (names.index("text"), names.index("label"))
    elif "label" in names or names[0] == "text" or len(head) == 1:
        # Half a header, taken for data, would become a class of its own.
        message = (
            f"{path} line {line}: text and label are two columns; begin with a header "
            "row that names them."
        )
        raise UserError(message)
    else:
        rows = chain([first], rows)
    for line, cells in rows:
        if len(cells) != len(head):
            message = (
                f"{path} line {line}: cell count is {len(cells)}, but {len(head)} in "
                f"line {first[0]}; quote a text that holds {delimiter!r}, or fill up "
                "the row."
            )
            raise UserError(message)
        yield f"{path} line {line}", line, [cells[column] for column in columns]


def _cells(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of a table that is not blank."""
    # Without `strict`, a stray quote swallows every row up to the next one, unseen.
    table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in table:
            if len(cells) > 1 or "".join(cells).strip():
                yield line, cells
            line = table.line_num + 1
    except csv.Error as error:
        message = (
            f"{path} line {line}: {error}; a cell that begins with a quote must end "
            "with one, and a quote inside it is written twice."
        )
        raise UserError(message) from error


_OBJECT = '{"text": "...", "label": ...}'
_EACH_LINE = f"each line holds {_OBJECT}"
FORMATS: dict[str, tuple[Callable[[Path, str], Iterator[_Entry]], str]] = {
    ".json": (_array, f'each entry is ["text", label] or {_OBJECT}'),
    ".jsonl": (_lines, _EACH_LINE),
    ".ndjson": (_lines, _EACH_LINE),
    ".csv": (partial(_table, delimiter=","), "each row holds a text and a label"),
    ".tsv": (partial(_table, delimiter="\t"), "each row holds a text and a label"),
}
"""Of each suffix: what reads it, and the form that its entries must have."""

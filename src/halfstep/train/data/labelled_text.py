"""Reads and validates rows of text and label.

In: a .json, .jsonl, .ndjson, .csv or .tsv file. Out: `Row` values, or a `UserError`
that names the file, the line and what to do.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from halfstep.errors import UserError
from halfstep.train.data import text_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# More digits are a phone number or a hash, so treated as a word.
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = (";", "\t", "|", ",")  # that a table in one column may have instead
# Maximum characters of a cell; csv's default is 131,072, and a text may be longer.
_LONGEST_CELL = 2**31 - 1


class Columns(NamedTuple):
    """Names of the table columns or JSON keys to read."""

    text: str = "text"
    label: str = "label"


DEFAULT_COLUMNS = Columns()
"""If unspecified: these names, or the first two columns, or a pair."""


class Row(NamedTuple):
    """One text and its label."""

    text: str
    """The text, unchanged; not blank."""
    label_word: str
    """The label, stripped; a whole number without leading zeros. JSON's true, false and
    numbers with a point are words, as in a table."""
    line: int
    where: str
    """Location for messages: file, line and, in an array, number of the entry."""


def is_number(label_word: str) -> bool:
    """Return whether a label is a whole number."""
    return _NUMBER.fullmatch(label_word) is not None


def read(path: Path, columns: Columns = DEFAULT_COLUMNS) -> Iterator[Row]:
    """Return an iterator over the rows of one file; it raises at an invalid row.

    Skipping what is not understood would train on less data than the user believes, or
    on a column that is not the label.

    Args:
        path: A UTF-8 file: `.json` is one array of `[text, label]` pairs or objects,
            `.jsonl` and `.ndjson` one of these per line, `.csv` and `.tsv` a table
            whose header names `text` and `label`; without a header, its first two
            columns.
        columns: Other names for these two; a table then must have a header, and JSON
            entries must be objects.

    Raises:
        UserError: At once if the file is invalid; during iteration if a row is.
    """
    entries, syntax = FORMATS[text_lines.check_file(path, FORMATS)]
    return _rows(path, entries(path, columns), syntax)


def has_no_header(path: Path, columns: Columns = DEFAULT_COLUMNS) -> bool:
    """Return whether a file is a table whose first row does not name the columns.

    A header with other names also looks like that, and its label like a class.
    """
    delimiter = _DELIMITERS.get(path.suffix.lower())
    first = next(_cells(path, delimiter), None) if delimiter else None
    return first is not None and not _is_header(first[1], columns)


def _rows(
    path: Path, entries: Iterator[text_lines.Entry], syntax: str
) -> Iterator[Row]:
    line = 0
    text: Any
    label: Any
    for where, line, entry in entries:
        match entry:
            case {"text": text, "label": label} | [text, label]:
                fault = _fault(text, label)
            case _:
                text = label = ""
                entry_text = text_lines.as_json(entry)
                fault = f"{entry_text} is not a text and its label; {syntax}"
        if fault:
            raise UserError(f"{where}: {fault}.")
        # As in a cell of a table: JSON's true, not Python's True.
        word = (label if isinstance(label, str) else json.dumps(label)).strip()
        yield Row(text, str(int(word)) if is_number(word) else word, line, where)
    if not line:
        raise UserError(f"{path} holds no rows; {syntax}.")


def _fault(text: object, label: object) -> str:
    """Return what is wrong with a text or a label; "" if both are valid."""
    if not isinstance(text, str):
        return f"text is {text_lines.as_json(text)}; a text is a string"
    if not text.strip():
        return "text is blank; give it words or drop the row"
    # pandas and others write a missing label as NaN.
    is_nan = isinstance(label, float) and not math.isfinite(label)
    if is_nan or not isinstance(label, int | float | str):
        return f"label is {text_lines.as_json(label)}; a label is a number or a word"
    if not str(label).strip():
        return "label is blank; a label is a number or a word"
    return text_lines.text_fault(f"{text}{label}")


def _objects(path: Path, columns: Columns) -> Iterator[text_lines.Entry]:
    """Yield the JSON entries; with custom names, map the keys to text and label."""
    for where, line, entry in text_lines.json_values(path):
        if columns == DEFAULT_COLUMNS:
            yield where, line, entry
        elif isinstance(entry, dict) and set(columns) <= entry.keys():
            text, label = entry[columns.text], entry[columns.label]
            yield where, line, {"text": text, "label": label}
        else:
            names = list(entry) if isinstance(entry, dict) else []
            missing = next(name for name in columns if name not in names)
            raise UserError(
                f"{where}: {text_lines.as_json(entry)} lacks {missing!r}"
                f"{_nearest(missing, names)}; see --text-column and --label-column."
            )


def _table(path: Path, columns: Columns) -> Iterator[text_lines.Entry]:
    delimiter = _DELIMITERS[path.suffix.lower()]
    rows = _cells(path, delimiter)
    first = next(rows, None)
    if first is None:
        return
    line, head = first
    names, wanted = _names(head), _names(columns)
    text, label = 0, 1
    other = next((mark for mark in _SEPARATORS if mark in head[0]), "")
    if len(head) == 1 and other:
        raise UserError(
            f"{path} line {line}: cells are separated by {other!r}; save it with "
            f"{delimiter!r}, as a {path.suffix} file has it."
        )
    if _is_header(head, columns):
        for name in wanted:
            if names.count(name) > 1:
                raise UserError(
                    f"{path} line {line}: {names.count(name)} columns are named "
                    f"{name!r}; rename all but one."
                )
        text, label = map(names.index, wanted)
    elif columns != DEFAULT_COLUMNS:
        missing = next(name for name in columns if _names([name])[0] not in names)
        raise UserError(
            f"{path} line {line}: no column is named {missing!r} in "
            f"{text_lines.as_json(head)}{_nearest(missing, head)}; see --text-column "
            "and --label-column."
        )
    elif "label" in names or names[0] == "text" or len(head) == 1:
        # Taken as data, an incomplete header would become a class.
        raise UserError(
            f"{path} line {line}: text and label are two columns; begin with a header "
            "row that names them, or give --text-column and --label-column."
        )
    else:
        rows = chain([first], rows)
    width = len(head)
    for line, cells in rows:
        if len(cells) != width:
            raise UserError(
                f"{path} line {line}: cell count is {len(cells)}, but {width} in "
                f"line {first[0]}; quote a text that holds {delimiter!r}, or fill up "
                "the row."
            )
        yield f"{path} line {line}", line, [cells[text], cells[label]]


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return a suggestion with the most similar name, ignoring case; "" if none is."""
    by_lower = {each.strip().lower(): each.strip() for each in names}
    near = difflib.get_close_matches(name.strip().lower(), by_lower, 1)
    return f"; nearest: {by_lower[near[0]]!r}" if near else ""


def _names(head: Iterable[str]) -> list[str]:
    return [cell.strip().lower() for cell in head]


def _is_header(head: list[str], columns: Columns) -> bool:
    return set(_names(columns)) <= set(_names(head))


def _cells(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and cells of each row of a table that is not blank."""
    # csv has no limit per reader, only this global one.
    csv.field_size_limit(_LONGEST_CELL)
    # Without `strict`, a stray quote silently merges all rows up to the next quote.
    table = csv.reader(text_lines.read_lines(path), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in table:
            if len(cells) > 1 or "".join(cells).strip():
                yield line, cells
            line = table.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path} line {line}: {error}; end lines with line feeds, and a cell that "
            "begins with a quote with one; a quote inside it is written twice."
        ) from error


_OBJECT = '{"text": "...", "label": ...}'
_EACH_LINE = f"each line holds {_OBJECT}"
_EACH_ROW = "each row holds a text and a label"
FORMATS: dict[
    str, tuple[Callable[[Path, Columns], Iterator[text_lines.Entry]], str]
] = {
    ".json": (_objects, f'each entry is ["text", label] or {_OBJECT}'),
    ".jsonl": (_objects, _EACH_LINE),
    ".ndjson": (_objects, _EACH_LINE),
    ".csv": (_table, _EACH_ROW),
    ".tsv": (_table, _EACH_ROW),
}
"""Suffix -> reader of the format, and what an entry must look like."""

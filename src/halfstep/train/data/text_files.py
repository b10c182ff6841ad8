"""Reads text files as records: the cells of a table's row, or a JSON value.

In: a file, perhaps compressed, in any encoding. Out: records, each with the line where
it starts; a `RowError` in place of a broken one; a `UserError` if the file as a whole
cannot be read.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter, deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from halfstep.errors import UserError
from halfstep.train.data.entity_files import RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Record = tuple[int, Any]
"""(line where it starts, its cells or its JSON value, or a `RowError`)."""

DELIMITERS = (",", "\t", ";", "|")

_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"  # first bytes
_HEAD = 8192  # bytes looked at before the first line
# csv's own limit of a cell is 131,072 characters, and a text may be longer.
_LONGEST_CELL = 2**31 - 1
_MAX_QUOTED = 40
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte-order mark -> encoding; UTF-32 first, as its mark begins with UTF-16's."""
_PUNCTUATION = (0xA1, 0xA2, 0xA3)  # first byte, in both of these:
_FREQUENT_PAIRS = {"gb18030": (0xB0, 0xD7, 0xA1), "big5": (0xA4, 0xC6, 0x40)}
"""Encoding -> first byte from, to, and second byte from, of nearly all of a text."""


def suffix_of(path: PurePath) -> str:
    """Return the suffix of a file's format, in lower case; that before .gz."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix == ".gz" else suffix


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if gzip wrote it.

    Raises:
        UserError: If the file cannot be opened, or read in the context.
    """
    try:
        with path.open("rb") as raw:
            is_gzip = raw.peek(2).startswith(_GZIP)
            yield cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if is_gzip else raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}.") from error


def read_lines(path: Path, encoding: str | None) -> Iterator[str]:
    """Yield the lines of a file, line ends kept; see `decode_lines`."""
    with open_bytes(path) as source:
        yield from decode_lines(str(path), source, encoding)


def decode_lines(
    name: str, source: BinaryIO, encoding: str | None = None
) -> Iterator[str]:
    """Yield the lines of a stream as they come, line ends kept, BOM removed.

    Only a line feed ends a line: `str.splitlines` would also split at U+2028, which may
    occur inside a text.

    Args:
        name: What messages call the stream.
        source: Bytes; those that are there are decoded before more are waited for.
        encoding: None is UTF-8.

    Raises:
        UserError: At bytes that are not of the encoding; it names the line and, if one
            is likely, the right encoding.
    """
    buffer = source if hasattr(source, "peek") else io.BufferedReader(source)  # type: ignore[type-var]
    head = buffer.peek(_HEAD)[:_HEAD]
    if head.startswith(_ZIP):
        message = f"{name} is a zip archive or an Excel workbook; save it as .csv."
        raise UserError(message)
    # UTF-16 without a mark decodes as UTF-8, with a NUL in each ASCII character.
    if encoding is None and (wide := _seems_wide(head)):
        raise UserError(f"{name} seems to be {wide}; give --encoding {wide}.")
    is_utf8 = encoding is None or codecs.lookup(encoding).name == "utf-8"
    text = io.TextIOWrapper(buffer, "utf-8-sig" if is_utf8 else encoding, newline="\n")
    number = 1
    try:
        for line in text:
            yield line
            number += 1
    except UnicodeError as error:
        raise _not_encoded(name, encoding, number, head, error) from error
    finally:
        text.detach()


def _not_encoded(
    name: str, encoding: str | None, line: int, head: bytes, error: UnicodeError
) -> UserError:
    """Return the error for undecodable bytes after the lines before `line`."""
    data, fault = head, str(error)  # a missing mark has no place
    if isinstance(error, UnicodeDecodeError):
        data = error.object
        line += data[: error.start].count(b"\n")
        fault = f"byte 0x{data[error.start]:02x}"
    likely = seems_to_be(data)
    advice = f"it seems to be {likely}: give --encoding {likely}"
    if likely is None:
        advice = "give its encoding as --encoding"
    return UserError(
        f"{name} line {line} is not {encoding or 'UTF-8'}: {fault}; {advice}."
    )


def _seems_wide(data: bytes) -> str | None:
    """Return the name of UTF-16 or UTF-32, by its mark or NULs; None for others."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            return encoding
    nuls = data[::2].count(0), data[1::2].count(0)
    if max(nuls) > max(len(data) / 200, 10 * min(nuls)):
        return "utf-16-be" if nuls[0] > nuls[1] else "utf-16-le"
    return None


def seems_to_be(data: bytes) -> str | None:
    """Return the encoding that a part of a file is likely to have; None if unclear.

    By marks and NULs, by the share of frequent characters of Chinese, and, for cp1252,
    by accented letters and signs that stand alone.
    """
    if wide := _seems_wide(data):
        return wide
    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(data)
        return "utf-8"
    runs = len(re.findall(rb"[\x80-\xff]+", data))
    alone = len(re.findall(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])", data))
    if alone > 0.8 * runs:
        return "cp1252"
    pairs = re.findall(rb"[\x81-\xfe][\x30-\xfe]", data)
    pairs = [pair for pair in pairs if pair[0] not in _PUNCTUATION]
    for encoding, (low, high, least) in _FREQUENT_PAIRS.items():
        frequent = sum(low <= a <= high and b >= least for a, b in pairs)
        if frequent > 0.6 * len(pairs):
            return encoding
    return None


def character_fault(text: str) -> str:
    """Return why the characters of a text are unusable; "" if they are not."""
    match = _UNUSABLE.search(text)
    if match is None:
        return ""
    if match[0] == "\0":
        return "it holds a NUL character; remove it"
    return "a character is cut in half (a lone surrogate); fix or drop it"


def sniff_delimiter(lines: Sequence[str], suffix: str) -> str:
    """Return the delimiter with which the first lines are rows of equal width.

    The suffix's own comes first; it is also the answer if none fits.
    """
    own = "," if suffix == ".csv" else "\t"

    def fit(delimiter: str) -> tuple[float, bool]:
        rows = [cells for _, cells in table_rows(lines, delimiter)]
        widths = Counter(len(cells) for cells in rows if isinstance(cells, list))
        width = len(rows[0]) if rows and isinstance(rows[0], list) else 1
        return widths[width] / len(rows) if width > 1 else 0.0, delimiter == own

    return max((own, *DELIMITERS), key=fit)


def table_rows(lines: Iterable[str], delimiter: str) -> Iterator[Record]:
    """Yield the cells of each row of a table that is not blank.

    A quote that does not close where a cell ends breaks the row of its line alone;
    `csv` would join the lines up to the next quote. Where tabs separate the cells,
    quotes are often plain characters: such a row is split at its tabs.
    """
    csv.field_size_limit(_LONGEST_CELL)  # csv has no limit per reader
    source, again = iter(lines), deque[str]()
    record: list[str] = []

    def record_lines() -> Iterator[str]:
        while line := again.popleft() if again else next(source, ""):
            record.append(line)
            yield line

    def new_table() -> Iterator[list[str]]:
        # Without `strict`, a stray quote silently merges rows.
        return csv.reader(record_lines(), delimiter=delimiter, strict=True)

    table, number = new_table(), 1
    while (cells := _next_row(table)) is not None:
        is_broken = isinstance(cells, RowError)
        if delimiter == "\t" and (
            is_broken or (len(record) > 1 and any(delimiter in cell for cell in cells))
        ):
            is_broken, cells = True, record[0].rstrip("\r\n").split(delimiter)
        if is_broken:  # the table has ended, or is in the middle of a row
            again.extendleft(reversed(record[1:]))
            del record[1:]
            table = new_table()
        if isinstance(cells, RowError) or len(cells) > 1 or "".join(cells).strip():
            yield number, cells
        number += len(record)
        record.clear()


def _next_row(table: Iterator[list[str]]) -> Any:  # noqa: ANN401 - cells or an error
    try:
        return next(table, None)
    except csv.Error as error:
        return RowError(
            "broken row",
            f"{str(error).partition(' - ')[0]}; end lines with line feeds, and a cell "
            "that begins with a quote with one; a quote inside it is written twice",
        )


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a dict; raise on duplicate keys, of which json silently keeps the last."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        fault = f"key {as_json(key)} appears twice in one object; keep one"
        raise RowError("broken JSON", fault)
    return mapping


def _decode(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON value; raise RowError if it is broken."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} " if error.lineno > 1 else ""
        fault = f"broken JSON at {place}column {error.colno}: {error.msg}"
        raise RowError("broken JSON", fault) from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, RowError):
            raise
        fault = "a number is too long or the nesting too deep"
        raise RowError("broken JSON", f"broken JSON: {fault}") from error


def json_lines(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the JSON value of each line that is not blank."""
    value: Any
    for number, line in enumerate(lines, start=1):
        if not (text := line.strip()):
            continue
        try:
            value = _decode(text)
        except RowError as error:
            value = error
        yield number, value


def json_rows(name: str, text: str) -> list[Any] | None:
    """Return the entries of a JSON array, or of the first array in a JSON object.

    None: the file holds a JSON object a line, for `json_lines`.

    Raises:
        UserError: At broken JSON.
    """
    try:
        value = _decode(text)
    except RowError as error:
        if text.lstrip().startswith("{") and "Extra data" in error.fault:
            return None
        raise UserError(f"{name}: {error.fault}.") from error
    values = value.values() if isinstance(value, dict) else [value]
    for each in values:
        if isinstance(each, list):
            return each
    raise UserError(
        f'{name} holds no JSON array; save one of all rows, [{{"text": ...}}, ...] '
        '(orient="records" in pandas), or one row a line.'
    )


def as_json(value: object) -> str:
    """Format a value as JSON for a message, truncated.

    Letters of any script stay; invisible characters, such as zero-width spaces and lone
    surrogates, are escaped.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)[: _MAX_QUOTED + 1]
    printable = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    return (
        printable if len(printable) <= _MAX_QUOTED else f"{printable[:_MAX_QUOTED]}..."
    )

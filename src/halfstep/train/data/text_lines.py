"""Reads text files by line, and JSON values together with their line numbers.

In: a UTF-8 file of any length. Out: its lines, or its JSON entries and their lines; or
a `UserError` that names the file, the line and what to do.
"""

from __future__ import annotations

import json
import re
from itertools import count
from typing import TYPE_CHECKING

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

Entry = tuple[str, int, object]
"""(location for messages, line, value before validation)."""

_NON_SPACE = re.compile(r"[^ \t\r\n]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
# Characters of an invalid value that a message quotes.
_MAX_QUOTED = 40


class _DuplicateKeyError(ValueError):
    """A JSON object contains a key twice; the argument is the key."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a dict; raise on duplicate keys, of which json silently keeps the last."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return mapping


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def accepted(suffixes: Iterable[str]) -> str:
    """Format suffixes as a list in words, for messages."""
    *others, last = suffixes
    return f"{', '.join(others)} or {last}"


def check_file(path: Path, suffixes: Collection[str]) -> str:
    """Check that a file exists and has a known suffix; return it in lower case."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise UserError(f"{path} is not there; give a file or a directory that exists.")
    if path.is_dir():
        raise UserError(f"{path} is a directory; give one file, {accepted(suffixes)}.")
    if not path.is_file():  # reading could block forever
        raise UserError(
            f"{path} is a pipe or a device, not a file; save its rows as "
            f"{accepted(suffixes)}."
        )
    if suffix not in suffixes:
        raise UserError(
            f"{path}: suffix {path.suffix!r} is unknown; save it as "
            f"{accepted(suffixes)}."
        )
    return suffix


def read_lines(path: Path) -> Iterator[str]:
    """Return an iterator over the lines of a UTF-8 file, ends kept, BOM removed."""

    def raw_lines() -> Iterator[bytes]:
        with path.open("rb") as file:
            yield from file

    return decode_lines(str(path), raw_lines())


def decode_lines(name: str, source: Iterable[bytes]) -> Iterator[str]:
    """Decode lines of UTF-8 lazily, line ends kept, byte-order mark removed.

    Only a line feed ends a line: `str.splitlines` would also split at U+2028, which may
    occur inside a text.
    """
    offset = 0
    try:
        for number, data in enumerate(source, start=1):
            yield _decode_line(name, number, offset, data)
            offset += len(data)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from error


def _decode_line(name: str, number: int, offset: int, data: bytes) -> str:
    """Decode one line; `offset` is its byte offset in the source."""
    try:
        text = (data if offset else data.removeprefix(_BOM)).decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + len(data) - len(error.object) + error.start
        raise UserError(
            f"{name} line {number} is not UTF-8: byte "
            f"0x{error.object[error.start]:02x} at offset {at}; save it as UTF-8."
        ) from error
    if "\0" in text:
        message = f"{name} line {number} holds a NUL byte; save it as UTF-8 plain text."
        raise UserError(message)
    return text


def text_fault(text: str) -> str:
    """Return why the characters of a text are invalid; "" if valid."""
    if _SURROGATE.search(text):
        return "a character is cut in half (a lone surrogate); fix or drop it"
    if "\0" in text:
        return "it holds a NUL character; remove it"
    return ""


def json_values(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file: `.json` is one array, others hold one per line."""
    return (_array if path.suffix.lower() == ".json" else _lines)(path)


def _lines(path: Path) -> Iterator[Entry]:
    """Yield one JSON value per line; skip blank lines."""
    for number, line in enumerate(read_lines(path), start=1):
        content = line.removesuffix("\n")
        at = _skip_space(content, 0)
        if at == len(content):
            continue
        entry, at = _decode_value(path, number, content, at)
        at = _skip_space(content, at)
        if at < len(content):
            raise _json_error(path, number, content, at, "Extra data after the value")
        yield f"{path} line {number}", number, entry


def _array(path: Path) -> Iterator[Entry]:
    """Yield the entries of an array, decoded one by one to know their lines."""
    text = "".join(read_lines(path))
    at = _skip_space(text, 0)
    if not text.startswith("[", at):
        raise _json_error(
            path, 1, text, at, "Expecting [ and all entries; one entry a line is .jsonl"
        )
    line, counted = 1, 0
    for number in count(1):
        at = _skip_space(text, at + 1)
        if number == 1 and text.startswith("]", at):
            break
        line += text.count("\n", counted, at)
        counted = at
        entry, at = _decode_value(path, 1, text, at)
        yield f"{path} line {line} entry {number}", line, entry
        at = _skip_space(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            raise _json_error(path, 1, text, at, "Expecting ',' or ']'")
    at = _skip_space(text, at + 1)
    if at < len(text):
        raise _json_error(path, 1, text, at, "Extra data after the array")


def as_json(value: object) -> str:
    """Format a value as JSON for a message, truncated.

    Letters of any script stay; invisible characters, such as zero-width spaces and lone
    surrogates, are escaped.
    """
    text = json.dumps(value, ensure_ascii=False)[: _MAX_QUOTED + 1]
    printable = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    return (
        printable if len(printable) <= _MAX_QUOTED else f"{printable[:_MAX_QUOTED]}..."
    )


def _decode_value(path: Path, first: int, text: str, at: int) -> tuple[object, int]:
    """Decode the JSON value at a position; return it and the position after it."""
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _json_error(path, first, text, error.pos, error.msg) from error
    except _DuplicateKeyError as error:
        line = first + text.count("\n", 0, at)
        raise UserError(
            f"{path} line {line}: key {as_json(error.args[0])} appears twice in "
            "one object; keep one of them."
        ) from error
    except (ValueError, RecursionError) as error:
        fault = "a number is too long or the nesting too deep"
        raise _json_error(path, first, text, at, fault) from error


def _json_error(path: Path, first: int, text: str, at: int, fault: str) -> UserError:
    """Return the error for invalid JSON at a position; `first` is the text's line."""
    line = first + text.count("\n", 0, at)
    column = at - text.rfind("\n", 0, at)
    message = f"{path} line {line} column {column}: broken JSON: {fault}."
    return UserError(message)


def _skip_space(text: str, at: int) -> int:
    """Return the position of the next character that is not JSON white space."""
    match = _NON_SPACE.search(text, at)
    return match.start() if match else len(text)

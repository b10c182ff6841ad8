"""Tables that render as text and JSON, for notebooks too; atomic text files."""

from __future__ import annotations

import contextlib
import html
import os
import re
import secrets
import shutil
import unicodedata
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, TextIO

from halfstep.reporting import json_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Cell = str | int | float | bool | None

REPR_LENGTH = 200
"""Most characters that a prompt shows of a result."""
MOST_ROWS = 20
"""Most rows that a prompt shows of a table."""

_GAP = 2  # spaces between columns
_NARROWEST = 12  # terminal columns below which wrapped text is unreadable
# Control characters, line breaks, what reverses the direction of text, halves of
# characters. Joiners of emoji and of Persian letters, and wide blanks, stay.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Report:
    """A result whose `str` is its text. Notebooks show all of it, a prompt one line."""

    def __repr__(self) -> str:
        """Return the class and the first line, at most `REPR_LENGTH` characters."""
        first = printable(str(self).partition("\n")[0])
        text = f"{type(self).__name__}: {first}"
        most = REPR_LENGTH - len("<>")
        return f"<{text if len(text) <= most else f'{text[: most - 3]}...'}>"

    def _repr_html_(self) -> str:
        """Return the text as notebooks show it."""
        lines = map(printable, str(self).split("\n"))
        return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


@dataclass(frozen=True, repr=False)
class Table(Report):
    """A titled grid of cells, laid out as text.

    A float is shown with `digits` digits after the point, None as "-", a bool as yes
    or no. A column of numbers is aligned right, any other left.
    """

    title: str
    "Shown above the table; empty for none."
    columns: tuple[str, ...]
    "Unique names; they are the keys in `data`."
    rows: tuple[tuple[Cell, ...], ...]
    "Rows with as many cells as there are columns; may be empty."
    notes: tuple[str, ...] = ()
    "Sentences shown below the table."
    digits: int = 3
    "Digits after the point, 0 or more; 3 distinguish most losses."

    def __str__(self) -> str:
        """Return `text`."""
        return self.text()

    def __repr__(self) -> str:
        """Return the `text` of the first rows."""
        return self.head().text()

    def head(self) -> Table:
        """Return the first `MOST_ROWS` rows; a note counts the others."""
        number = len(self.rows) - MOST_ROWS
        if number <= 0:
            return self
        note = f"... and {format_count(number, 'more row', 'more rows')}: print all"
        return replace(self, rows=self.rows[:MOST_ROWS], notes=(note, *self.notes))

    def text(self, width: int | None = None) -> str:
        """Lay the table out for a terminal or a pipe.

        Why not `len`: it counts a Chinese character as one, but a terminal shows it two
        wide, so columns padded by `len` would not line up.

        Args:
            width: Terminal columns to fit, 1 or more: text is wrapped, in the last text
                column first, in other columns and headers if necessary, and so are
                title and notes. Columns that still do not fit follow below, with the
                first column repeated. None, for a pipe, wraps nothing.

        Returns:
            Lines without trailing spaces or a trailing newline.
        """
        grid = [tuple(map(printable, self.columns)), *self.formatted_rows()]
        numeric, columns = self.numeric(), list(zip(*grid, strict=True))
        least = [_min_width(*each) for each in zip(columns, numeric, strict=True)]
        title = wrap(self.title, width) if self.title else []
        notes = chain.from_iterable(wrap(note, width) for note in self.notes)
        blocks = [
            _block([columns[j] for j in block], [numeric[j] for j in block], width)
            for block in _blocks(least, width)
        ]
        return "\n".join([*title, "\n\n".join(blocks), *notes])

    def data(self) -> dict[str, object]:
        """Return title, columns, notes and rows, as dicts by column, for `json.dumps`.

        JSON has no NaN or infinity, though Python writes them. Here they become the
        strings "nan", "inf" and "-inf", which `float` reads back; null would make a
        loss that diverged look like one that was never measured.
        """
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        columns, notes = list(self.columns), list(self.notes)
        plain: list[dict[str, object]] = json_fields.plain(rows)
        return {"title": self.title, "columns": columns, "rows": plain, "notes": notes}

    def numeric(self) -> list[bool]:
        """Return for each column whether all its cells are numbers or None."""
        kinds = [{type(row[j]) for row in self.rows} for j in range(len(self.columns))]
        return [
            bool(kind) and not any(issubclass(t, str | bool) for t in kind)
            for kind in kinds
        ]

    def formatted_rows(self) -> list[tuple[str, ...]]:
        """Return the cells as text, the same for every output format."""

        def word(cell: Cell) -> str:
            if cell is None or isinstance(cell, bool):
                return {None: "-", True: "yes", False: "no"}[cell]
            if isinstance(cell, float):
                return f"{cell:z.{self.digits}f}"  # z: no -0.000
            return printable(str(cell))

        return [tuple(map(word, row)) for row in self.rows]


def terminal_width() -> int | None:
    """Return COLUMNS, or the terminal's width; None for a pipe."""
    return shutil.get_terminal_size((0, 0)).columns or None


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 text", "2 texts"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 file that replaces `path` atomically when it is closed.

    Symbolic links are followed, terminals and pipes are written directly, and line
    endings are written unchanged.
    """
    direct = path.exists() and not path.is_file()
    target = path if direct else path.resolve()
    # Not `tempfile`, whose mode would hide the report from other users.
    part = path if direct else target.parent / f".{secrets.token_hex(8)}.tmp"
    file = part.open("w" if direct else "x", encoding="utf-8", newline="")
    try:
        yield file
        file.flush()
        if not direct:
            os.fsync(file.fileno())
        file.close()
        if not direct:
            part.replace(target)
    except BaseException:
        # If flushing failed, closing fails again; report the first error.
        with contextlib.suppress(OSError):
            file.close()
        if not direct:
            part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically, as `open_atomic` does."""
    with open_atomic(path) as file:
        file.write(text)


def printable(text: str) -> str:
    r"""Return a text as people see it: what is no letter of it is escaped.

    Whatever shows texts or labels of users applies this; data files hold them as they
    are.

    Example:
        >>> print(printable("joy\n\x1b[31m"))
        joy\n\x1b[31m
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def _width(text: str) -> int:
    """Return the terminal columns of `text`: 2 for wide characters, 0 for combining."""
    narrow = sum(unicodedata.category(c) not in {"Mn", "Me", "Cf"} for c in text)
    return narrow + sum(unicodedata.east_asian_width(c) in {"W", "F"} for c in text)


def _pad(text: str, size: int, right: bool) -> str:
    blank = " " * (size - _width(text))
    return blank + text if right else text + blank


def _min_width(column: Sequence[str], number: bool) -> int:
    """Return the least width of a column, whose first element is its name."""
    head, *body = column
    if not number:
        return min(max(map(_width, column)), _NARROWEST)
    return max(map(_width, (*head.split(), *body)), default=0)


def _blocks(least: list[int], width: int | None) -> list[list[int]]:
    """Return blocks of column indices that fit side by side, each with column 0."""
    blocks = [[0]]
    for j in range(1, len(least)):
        taken = sum(least[i] + _GAP for i in blocks[-1]) + least[j]
        if width is not None and taken > width and blocks[-1] != [0]:
            blocks.append([0])
        blocks[-1].append(j)
    return blocks


def _block(
    columns: list[tuple[str, ...]], numeric: list[bool], width: int | None
) -> str:
    """Lay out columns side by side; text is wrapped, in the last text column first."""
    sizes = [max(map(_width, column)) for column in columns]
    words = [j for j, number in enumerate(numeric) if not number]
    others = sorted(words[:-1], key=lambda j: -sizes[j])
    heads = [j for j, number in enumerate(numeric) if number]
    for j in (*words[-1:], *others, *heads) if width is not None else ():
        excess = sum(sizes) + _GAP * (len(sizes) - 1) - (width or 0)
        sizes[j] = max(sizes[j] - max(excess, 0), _min_width(columns[j], numeric[j]))
    head, *body = [
        _layout_row(row, sizes, numeric) for row in zip(*columns, strict=True)
    ]
    rule = (" " * _GAP).join("-" * size for size in sizes)
    return "\n".join([*head, rule, *chain.from_iterable(body)])


def _layout_row(
    row: tuple[str, ...], sizes: list[int], numeric: list[bool]
) -> list[str]:
    """Lay out one row as lines, as many as its tallest cell needs."""
    stacks = map(wrap, row, sizes)
    return [
        (" " * _GAP).join(map(_pad, parts, sizes, numeric)).rstrip()
        for parts in zip_longest(*stacks, fillvalue="")
    ]


def wrap(text: str, size: int | None) -> list[str]:
    """Wrap `text` at spaces, or anywhere in words that are too long, as in Chinese."""
    text, lines = printable(text.strip()), []
    while size is not None and _width(text) > size:
        fits = [i for i in range(2, size + 1) if _width(text[:i]) <= size] or [1]
        end = max(text.rfind(" ", 0, fits[-1] + 1), 0) or fits[-1]
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]

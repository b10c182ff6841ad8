"""Turns the rows of a table into texts and targets, or raises `RowError`."""

from __future__ import annotations

import contextlib
import json
import math
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from halfstep.train.data import text_files
from halfstep.train.data.columns import ColumnRequest, Columns
from halfstep.train.data.entity_files import (
    RowError,
    annotated_row,
    row_tags,
    tag_column,
    tag_scheme,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfstep.train.data.data_format import DataFormat
    from halfstep.train.data.entity_files import Span
    from halfstep.train.data.tables import Table
    from halfstep.train.data.text_files import Record

_PEEKED = 1000  # rows by which columns and schemes of tags are chosen
# Far from where fp32 overflows: differences of two labels are computed in it.
_LARGEST = 1e37
_TOKENS = ("tokens", "words")  # keys of a row that is split already


def row_reader(
    table: Table, data_format: DataFormat, *, needs_label: bool
) -> LabelledRows | AnnotatedRows:
    """Return what reads the rows of a table; see `LabelledRows`."""
    if data_format.task == "ner":
        return AnnotatedRows(table)
    return LabelledRows(table, data_format, needs_label=needs_label)


class LabelledRows:
    """The rows of a table with texts and labels; the columns are chosen at once."""

    def __init__(
        self, table: Table, data_format: DataFormat, *, needs_label: bool
    ) -> None:
        """Choose the columns.

        Args:
            table: Its rows are read from here on.
            data_format: Which columns, and what a label is.
            needs_label: Whether a table without labels is an error.

        Raises:
            UserError: If it is not clear which columns hold text and label.
        """
        self.rows: Iterator[Record]
        """Line and row, without a header."""
        self._format = data_format
        # A file's columns do not depend on the limit.
        limit = data_format.limit if data_format.streaming else None
        head = list(islice(table.rows, min(_PEEKED, limit or _PEEKED)))
        good = [i for i, (_, row) in enumerate(head) if not isinstance(row, RowError)]
        self.columns = Columns((), ("",))
        if good:
            line, rows = head[good[0]][0], [head[i][1] for i in good]
            where = f"{table.source} line {line}" if table.has_cells else table.source
            names = data_format.text_columns, data_format.label_column
            request = ColumnRequest(
                where, *names, needs_label=needs_label, is_table=table.has_cells
            )
            if table.has_cells:
                self.columns = request.of_table(rows, f"line {line}")
            else:
                self.columns = request.of_objects(rows)
        if self.columns.has_header:
            del head[good[0]]
        self.rows = chain(head, table.rows)
        self.note = self.columns.note
        label = self.columns.label
        if table.select is not None:
            used = [*self.columns.text, *([label] if label else [])]
            top = [n if n in self.columns.names else n.split(".")[0] for n in used]
            self.rows = table.select(list(dict.fromkeys(top)))
        self._texts = [self.columns.getter(name) for name in self.columns.text]
        self._label = self.columns.getter(label) if label else None
        self._label_names = table.names_of.get(label or "")

    def texts(self, row: Any) -> list[str]:  # noqa: ANN401 - any JSON
        """Return a row's text, or both of a pair."""
        if isinstance(row, RowError):
            raise row
        self.columns.check(row)
        return [_text(get(row)) for get in self._texts]

    def values(self, row: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """Return a row's text or texts, and its label."""
        texts = self.texts(row)
        value = self._label(row) if self._label else None
        return (*texts, self._target(value))

    def own(self, row: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return a row's own columns, as they are in the file."""
        if isinstance(row, dict):
            return row
        return dict(zip(self.columns.unique_names, row, strict=True))

    def _target(self, value: Any) -> str | float | list[str]:  # noqa: ANN401
        if self._format.target == "regression":
            return _number(value)
        if self._format.target == "class":
            return _label(value, self._label_names)
        if value is None:
            raise RowError("missing label", "label is missing")
        if isinstance(value, str):
            value = _label_list(value, self._format.label_separator or ",")
        values = value if isinstance(value, list) else [value]
        return list(dict.fromkeys(_label(each, self._label_names) for each in values))


class AnnotatedRows:
    """The rows of a table with entities."""

    note = ""

    def __init__(self, table: Table) -> None:
        """Recognise the scheme of tags by the first rows."""
        self._table = table
        self.rows, self._scheme = table.rows, None
        if table.is_tagged:
            return
        head = list(islice(table.rows, _PEEKED))
        self.rows = chain(head, table.rows)
        sentences = []
        for _, row in head:
            # A row with a mistake is reported when its turn comes.
            with contextlib.suppress(RowError):
                if isinstance(row, dict):
                    sentences.append(row_tags(row, self._names(row)))
        self._scheme = tag_scheme(sentences) if any(sentences) else None

    def values(self, row: Any) -> tuple[str, list[Span]]:  # noqa: ANN401
        """Return a row's text and its entities."""
        if isinstance(row, RowError):
            raise row
        if self._table.is_tagged:
            return row  # type: ignore[no-any-return]
        return annotated_row(row, self._names(row), self._scheme)

    def texts(self, row: Any) -> list[str]:  # noqa: ANN401
        """Return a row's text, whether it has entities or not."""
        if not isinstance(row, dict):
            return [self.values(row)[0]]
        tokens = next((row[key] for key in _TOKENS if key in row), None)
        if isinstance(tokens, list) and "text" not in row:
            row = {"tokens": tokens, "tags": ["O"] * len(tokens)}
            return [annotated_row(row)[0]]
        return [_text(row.get("text"))]

    def own(self, row: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return a row's own columns; none where it is tagged lines."""
        return row if isinstance(row, dict) else {}

    def _names(self, row: Any) -> Sequence[str] | None:  # noqa: ANN401
        """Return the names of a row's tags, if they are numbers with names."""
        if not isinstance(row, dict):
            return None
        return self._table.names_of.get(tag_column(row) or "")


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Return a text unchanged; raise RowError if it cannot be used."""
    if not isinstance(value, str):
        # pandas and others write a missing text as null or NaN.
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise RowError("missing text", "text is missing")
        message = f"text is {text_files.as_json(value)}; a text is a string"
        raise RowError("invalid text", message)
    if not value or value.isspace():
        raise RowError("blank text", "text is blank")
    if fault := text_files.character_fault(value):
        raise RowError("invalid text", f"text: {fault}")
    return value


def _label(value: Any, names: Sequence[str] | None = None) -> str:  # noqa: ANN401
    """Return a label as a word; raise RowError if it cannot be used.

    A string stands as it is, but for white space around it. A whole number of JSON or
    parquet has no fraction: a column of integers becomes one of floats when a label is
    missing. JSON's true is a word, as in a table.
    """
    if isinstance(value, str):
        word = value.strip()
        if not word:
            raise RowError("missing label", "label is blank")
        if fault := text_files.character_fault(word):
            raise RowError("invalid label", f"label: {fault}")
        return word
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise RowError("missing label", "label is missing")
    if isinstance(value, bool):
        return "true" if value else "false"
    if names is not None and isinstance(value, int):
        if value < 0:  # what `datasets` writes where a label is not known
            raise RowError("missing label", "label is missing")
        return names[value]
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    advice = "several labels need --multi-label" if isinstance(value, list) else ""
    raise RowError(
        "invalid label",
        f"label is {text_files.as_json(value)}; "
        f"{advice or 'a label is a number or a word'}",
    )


def _label_list(cell: str, separator: str) -> list[Any]:
    """Return the labels in a cell: a JSON array, as predict writes, or separated."""
    with contextlib.suppress(ValueError, RecursionError):
        if cell.startswith("[") and isinstance(labels := json.loads(cell), list):
            return labels
    return [part for part in cell.split(separator) if part.strip()]


def _number(value: Any) -> float:  # noqa: ANN401
    """Return a label as a finite number; raise RowError if it is none."""
    word = _label(value)
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST:
        needed = "a number" if math.isnan(number) else f"numbers up to {_LARGEST:g}"
        message = f"label is {text_files.as_json(word)}; --regression needs {needed}"
        raise RowError("invalid label", message)
    return number

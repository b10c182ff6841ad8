"""Chooses the columns of a table, or the keys of JSON rows, with text and label.

In: the first rows, and the names that the user gave. Out: `Columns`, which extracts
the values of a row, or a `UserError` with the nearest name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.train.data.entity_files import RowError
from halfstep.train.data.text_files import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_USUAL = {
    "text": (
        *("text", "sentence", "review", "content", "tweet", "comment", "message"),
        *("post", "utterance", "document", "body", "sms", "headline"),
    ),
    "label": (
        *("label", "labels", "category", "class", "sentiment", "target", "stars"),
        *("rating", "emotion", "intent", "tag"),
    ),
}
"""What a column holds -> its usual names, in lower case; the first is the default."""
_FLAGS = "--text-column and --label-column"
# Rows from which on repeated values tell labels from texts, and a header from a row.
_MIN_TELLING_ROWS = 5
_LONGEST_LABEL = 40  # characters
_PAIR = 2
_MAX_LISTED = 12


@dataclass(frozen=True)
class Columns:
    """Where the values of a row are."""

    names: tuple[str, ...]
    """Names of all columns, in their order; numbers from 1 without a header."""
    text: tuple[str, ...]
    """Name of the text's column, or two: of a sentence pair."""
    label: str | None = None
    """Name of the label's column; None if there is none."""
    is_list: bool = False
    """Whether a row is a list of cells, not an object."""
    has_header: bool = False
    note: str = ""
    """How the columns were chosen, where that was not obvious."""
    first: str = "the first row"
    """Where the row is that has as many cells as all must have."""

    @cached_property
    def unique_names(self) -> tuple[str, ...]:
        """The names; one that is there already has a number, as in pandas: id, id.1."""
        names: dict[str, None] = {}
        for name in self.names:
            numbers = (f"{name}.{number}" for number in count(1))
            names[next(n for n in chain([name], numbers) if n not in names)] = None
        return tuple(names)

    def check(self, row: Any) -> None:  # noqa: ANN401 - any JSON
        """Raise RowError if a row has not the shape of the first one."""
        if self.is_list and isinstance(row, list):
            if len(row) == len(self.names):
                return
            fault = (
                f"cell count is {len(row)}, but {len(self.names)} in {self.first}; "
                "quote a text that holds the delimiter, or fill up the row"
            )
        elif isinstance(row, dict) and not self.is_list:
            return
        else:
            fault = f"{as_json(row)} has another form than the first row"
        raise RowError("broken row", fault)

    def getter(self, name: str) -> Callable[[Any], Any]:
        """Return a function from a row to its value in a column; None if absent."""
        if self.is_list:
            return itemgetter(self.names.index(name))
        path = [name] if name in self.names else name.split(".")

        def nested(row: Any) -> Any:  # noqa: ANN401
            for key in path:
                row = row.get(key) if isinstance(row, dict) else None
            return row

        return nested


@dataclass(frozen=True)
class ColumnRequest:
    """What the user said of the columns of a source."""

    source: str
    """For messages: the file, and for a table the line of its first row."""
    text: tuple[str, ...] | None
    """The names in --text-column; dotted ones reach into objects."""
    label: str | None
    """The name in --label-column."""
    needs_label: bool = True
    """Whether rows without labels are an error."""
    is_table: bool = False
    """Whether rows are cells, perhaps without a header."""

    def of_table(self, rows: Sequence[list[str]], first: str) -> Columns:
        """Choose the columns of a table by its first rows, at least one.

        Args:
            rows: Cells; the first row may be a header.
            first: Where the first row is, such as "line 1".
        """
        head = tuple(cell.strip() for cell in rows[0])
        numbers = tuple(map(str, range(1, len(head) + 1)))
        rows = [row for row in rows if len(row) == len(head)]
        asked = {*(self.text or ()), *([self.label] if self.label else [])}
        if asked and asked <= set(numbers) and not asked <= set(head):
            chosen = self._of_names(numbers)
        elif asked or self._is_header(head, rows[1:]):
            chosen = replace(self._of_names(head), has_header=True)
        elif len(head) == 1 and not self.needs_label:
            chosen = Columns(numbers, ("1",))
        elif len(head) == _PAIR:
            chosen = self._by_values(rows)
        elif len(head) == 1:
            raise self._error(
                f"{as_json(head[0])} is the only cell; text and label are two columns, "
                "and --delimiter is what separates them"
            )
        else:
            raise self._error(
                f"no column is named like a text or a label in {as_json(head)}; give "
                f"{_FLAGS}, by name or, without a header, by number from 1"
            )
        return replace(chosen, is_list=True, first=first)

    def of_objects(self, rows: Sequence[Any]) -> Columns:
        """Choose the keys of JSON rows or of an Arrow table, by its first rows.

        Args:
            rows: Objects, or [text, label] pairs; at least one.
        """
        objects = [row for row in rows if isinstance(row, dict)]
        if objects:
            top = tuple(dict.fromkeys(name for row in objects for name in row))
            leaves = dict.fromkeys(name for row in objects for name in _leaves(row))
            # An object may be null in some rows.
            inner = {name.rpartition(".")[0] for name in leaves}
            names = tuple(name for name in leaves if name not in inner)
            return replace(self._of_names(names), names=top)
        if isinstance(rows[0], list) and not (self.text or self.label):
            return Columns(("1", "2"), ("1",), "2", is_list=True)
        raise self._error(
            f'{as_json(rows[0])} is no JSON object; a row is {{"text": "...", "label": '
            '...}, or ["text", label]'
        )

    def _error(self, fault: str) -> UserError:
        return UserError(f"{self.source}: {fault}.")

    def _of_names(self, names: tuple[str, ...]) -> Columns:
        """Choose by the names that the user gave, and else by usual ones."""
        label = self.label and self._named(self.label, names, "label")
        if self.text:
            text = tuple(self._named(each, names, "text") for each in self.text)
        else:
            one = self._usual("text", names, label)
            other = label or self._usual("label", names, one)
            text = (one or self._only_other("text", names, other),)
        label = label or self._usual("label", names, text[0])
        if label is None and self.needs_label:
            label = self._only_other("label", names, text[0])
        if label in text:
            raise self._error(f"{label!r} is both text and label; name two columns")
        note = ""
        if not self.text and text[0].lower() != _USUAL["text"][0]:
            note = f"text from column {text[0]!r}, label from column {label!r}"
        elif not self.label and label and label.lower() != _USUAL["label"][0]:
            note = f"label from column {label!r}"
        return Columns(names, text, label, note=note)

    def _named(self, asked: str, names: tuple[str, ...], what: str) -> str:
        """Return the column that a flag names, by its letters in either case."""
        lower = [name.strip().lower() for name in names]
        same = [name for name in names if name == asked] or [
            names[i] for i, name in enumerate(lower) if name == asked.strip().lower()
        ]
        if len(same) == 1:
            return same[0]
        if same:
            raise self._error(
                f"{len(same)} columns are named {asked!r}; rename all but one"
            )
        near = difflib.get_close_matches(asked.strip().lower(), lower, 1)
        hint = f"it has {_listed(names)}"
        if self.is_table:
            hint += "; without a header, give its number, from 1"
        if near:
            hint = f"nearest: {names[lower.index(near[0])]!r}"
        raise self._error(f"--{what}-column {asked}: no column has that name; {hint}")

    def _usual(
        self, what: str, names: tuple[str, ...], other: str | None
    ) -> str | None:
        """Return the one column with a usual name, or with the default name."""
        usual = _USUAL[what]
        same = [name for name in names if name.lower() in usual and name != other]
        same = [name for name in same if name.lower() == usual[0]] or same
        if len(same) > 1:
            raise self._error(
                f"{what} could be column {_listed(same)}; choose with --{what}-column, "
                "or rename one"
            )
        return same[0] if same else None

    def _only_other(self, what: str, names: tuple[str, ...], one: str | None) -> str:
        """Return the second of two columns, or raise."""
        if one is not None and len(names) == _PAIR and names[0] != names[1]:
            return names[1 - names.index(one)]
        raise self._error(
            f"no column is named like a {what}; it has {_listed(names)}; choose with "
            f"--{what}-column"
        )

    def _is_header(self, head: tuple[str, ...], others: Sequence[list[str]]) -> bool:
        """Return whether the first row has usual names that are in no other row."""
        lower = [cell.lower() for cell in head]
        if "text" in lower and ("label" in lower or not self.needs_label):
            return True
        usual = {name for names in _USUAL.values() for name in names}
        return any(
            name in usual and all(row[i].strip() != head[i] for row in others)
            for i, name in enumerate(lower)
        )

    def _by_values(self, rows: Sequence[list[str]]) -> Columns:
        """Choose between two columns without usual names by their values.

        The label is in the second one, unless the first holds few, short values and
        the second many.
        """
        columns = [[row[i].strip() for row in rows] for i in (0, 1)]
        distinct = [len(set(column)) for column in columns]
        is_label = [
            len(rows) >= _MIN_TELLING_ROWS
            and 2 * distinct[i] <= distinct[1 - i]
            and max(map(len, columns[i])) <= _LONGEST_LABEL
            for i in (0, 1)
        ]
        label = 0 if is_label[0] else 1
        first, *others = columns[label]
        if is_label[label] and first not in others and self.needs_label:
            raise self._error(
                f"label {first!r} is in no other of the first {len(rows)} rows: "
                f"if it is a header, give {_FLAGS}; otherwise drop the row"
            )
        note = "" if label else "no header: label from column 1, text from column 2"
        return Columns(("1", "2"), (str(2 - label),), str(1 + label), note=note)


def _leaves(row: dict[str, Any], prefix: str = "") -> Iterable[str]:
    """Yield the dotted name of each value that is no object."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _listed(names: Iterable[str]) -> str:
    return ", ".join([repr(name) for name in names][:_MAX_LISTED])

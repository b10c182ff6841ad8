"""How --data is read: what a row holds, and in which columns and characters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFormat:
    """How the rows of a file, a folder or a hub data set are read."""

    task: str = "classify"
    """"classify" or "ner"."""
    target: str = "class"
    """classify: what a label is: "class", "multi_label" or "regression"."""
    text_columns: tuple[str, ...] | None = None
    """One name, or two of a sentence pair; dotted ones reach into JSON objects."""
    label_column: str | None = None
    label_separator: str | None = None
    """multi_label: what separates labels in one cell; None is a comma."""
    encoding: str | None = None
    """None is UTF-8, with or without a byte-order mark."""
    delimiter: str | None = None
    """What separates the cells of a table; None: recognised from the first lines."""
    skip_bad_rows: bool = False
    streaming: bool = False
    """Fetch from the hub only the rows that `limit` allows."""
    limit: int | None = None
    """Rows of a file, or of the train split; None: all."""

"""Opens files and data sets as tables: rows with line numbers, before validation."""

from __future__ import annotations

import difflib
import io
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.train.data import text_files
from halfstep.train.data.entity_files import tagged_sentences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from halfstep.train.data.data_format import DataFormat
    from halfstep.train.data.text_files import Record

FASTTEXT = "__label__"
"""Prefix of a label in fastText's files, which begin each line with labels."""

_JSON = (".json", ".jsonl", ".ndjson")
_TAGGED = (".bmes", ".bio", ".bioes", ".conll", ".iob", ".iob2", ".tsv", ".txt")
SUFFIXES = {
    "classify": (".csv", ".tsv", ".txt", *_JSON, ".parquet"),
    "ner": (*_TAGGED, *_JSON, ".parquet"),
}
"""Task -> suffixes of the files it reads; each may have .gz after it."""

_FORMS = "give a file, a folder, or a data set of the hub as org/name"
_BATCH = 2000  # rows of Arrow converted at once
_SNIFFED = 50  # lines by which the delimiter of a table is recognised


@dataclass
class Table:
    """The rows of a file or a data set, which can be read once."""

    source: str
    rows: Iterator[Record]
    unit: str = "line"
    """What the numbers of the rows count, from 1: "line" or "row"."""
    has_cells: bool = False
    """Whether rows are lists of cells, of which the first may be a header."""
    is_tagged: bool = False
    """Whether rows are (text, spans) already."""
    names_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Column -> names of its integers, where the source has them (ClassLabel)."""
    select: Callable[[Sequence[str]], Iterator[Record]] | None = None
    """Returns the rows again, with these columns alone; None: it would save nothing."""


def check_file(path: Path, task: str) -> None:
    """Raise if a path is no file of a known format."""
    suffix, known = text_files.suffix_of(path), ", ".join(SUFFIXES[task])
    if not path.exists():
        names = [each.name for each in path.parent.glob("*")]
        near = difflib.get_close_matches(path.name, names, 1)
        hint = f"nearest: {path.with_name(near[0])}" if near else _FORMS
        raise UserError(f"{path} is not there; {hint}.")
    if not path.is_file():  # reading could block forever
        raise UserError(
            f"{path} is a pipe or a device, not a file; save its rows as {known}."
        )
    if suffix not in SUFFIXES[task]:
        raise UserError(
            f"{path}: suffix {suffix!r} is unknown for --task {task}; save it as one "
            f"of {known}, perhaps with .gz."
        )


def open_file(path: Path, data_format: DataFormat) -> Table:
    """Open a file by its suffix."""
    suffix, source = text_files.suffix_of(path), str(path)
    if suffix == ".parquet":
        return _of_parquet(path)
    lines: Iterator[str] = text_files.read_lines(path, data_format.encoding)
    if suffix == ".json":
        text = "".join(lines)
        rows = text_files.json_rows(source, text)
        if rows is not None:
            return Table(source, enumerate(rows, start=1), "row")
        lines = io.StringIO(text, newline="\n")
    if suffix in _JSON:
        return Table(source, text_files.json_lines(lines))
    if data_format.task == "ner":
        sentences = tagged_sentences(_Lines(path, data_format.encoding))
        return Table(source, sentences, is_tagged=True)
    head = list(islice(lines, _SNIFFED))
    lines = chain(head, lines)
    if next((line for line in head if line.strip()), "").startswith(FASTTEXT):
        return Table(source, _fasttext_rows(lines, data_format.target))
    delimiter = data_format.delimiter or text_files.sniff_delimiter(head, suffix)
    return Table(source, text_files.table_rows(lines, delimiter), has_cells=True)


@dataclass
class _Lines:
    """The lines of a file, which can be iterated more than once."""

    path: Path
    encoding: str | None

    def __iter__(self) -> Iterator[str]:
        return text_files.read_lines(self.path, self.encoding)


def _fasttext_rows(lines: Iterable[str], target: str) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        labels = []
        text = line.strip()
        while text.startswith(FASTTEXT):
            word, _, text = text.partition(" ")
            labels.append(word.removeprefix(FASTTEXT))
            text = text.lstrip()
        is_one = len(labels) == 1 and target != "multi_label"
        if labels or text:
            yield number, {"text": text, "label": labels[0] if is_one else labels}


def _of_parquet(path: Path) -> Table:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with text_files.open_bytes(path) as source:
            is_plain = isinstance(source, io.BufferedReader)
            file = pq.ParquetFile(path if is_plain else pa.BufferReader(source.read()))
        features = datasets.Features.from_arrow_schema(file.schema_arrow)
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        message = f"{path} is no parquet file: {one_line(error)}."
        raise UserError(message) from error

    def rows(names: Sequence[str] | None = None) -> Iterator[Record]:
        return _numbered(_rows_of(file.iter_batches(_BATCH, columns=names)), str(path))

    return Table(str(path), rows(), "row", names_of=_names_of(features), select=rows)


def of_set(data_set: Any, source: str) -> Table:  # noqa: ANN401 - of datasets
    """Return the rows of a `datasets.Dataset`, or of one that is streamed."""
    import datasets

    names_of = _names_of(data_set.features or {})
    if not isinstance(data_set, datasets.Dataset):
        return Table(source, _numbered(data_set, source), "row", names_of=names_of)

    def rows(names: Sequence[str] | None = None) -> Iterator[Record]:
        chosen = data_set.select_columns(list(names)) if names else data_set
        return _numbered(_rows_of(chosen.with_format("arrow").iter(_BATCH)), source)

    return Table(source, rows(), "row", names_of=names_of, select=rows)


def _rows_of(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    return chain.from_iterable(batch.to_pylist() for batch in batches)


def _numbered(rows: Iterable[Any], source: str) -> Iterator[Record]:
    """Yield row number and row; raise UserError where the next cannot be read."""
    import datasets
    import pyarrow as pa

    faults = (OSError, ValueError, RuntimeError, pa.ArrowException)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, row
    except (*faults, datasets.exceptions.DatasetsError) as error:
        message = f"{source} cannot be read after row {number}: {one_line(error)}."
        raise UserError(message) from error


def _names_of(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the integers in each column of classes, or lists of them."""
    inner = {key: getattr(each, "feature", each) for key, each in features.items()}
    return {key: each.names for key, each in inner.items() if hasattr(each, "names")}


def one_line(error: Exception) -> str:
    """Return an error's text as one line, cut and without a full stop."""
    return " ".join(str(error).split())[:200].rstrip(".")

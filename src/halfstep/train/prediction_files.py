"""Shows predictions, or writes them beside the columns of the rows they are for.

Rows are written as they come, to CSV, TSV or JSON Lines.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import sys
import time
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TextIO

from halfstep.errors import UserError
from halfstep.reporting.table import Table, format_count, open_atomic
from halfstep.train.task_progress import counter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from halfstep.train.data.source import TextRow
    from halfstep.train.predict import Predictor

    Row = Mapping[str, Any]
    Write = Callable[[Sequence[Row]], object]

_NO_TEXT = "there is no text to predict; give at least one."
PREVIEW = 20
"""Rows of a file that a terminal shows."""
# Dates and decimals of a parquet file become text.
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


def _delimited(delimiter: str, file: TextIO, columns: Collection[str]) -> Write:
    """Write text and numbers as they stand, other values as JSON, None as nothing."""

    def cell(value: object) -> object:
        is_plain = type(value) in {str, int, float, NoneType}
        return value if is_plain else _JSON.encode(value)

    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    return lambda rows: writer.writerows(
        [cell(row.get(name)) for name in columns] for row in rows
    )


def _json_lines(file: TextIO, _: Collection[str]) -> Write:
    return lambda rows: file.writelines(f"{_JSON.encode(row)}\n" for row in rows)


WRITERS: dict[str, Callable[[TextIO, Collection[str]], Write]] = {
    ".csv": partial(_delimited, ","),
    ".tsv": partial(_delimited, "\t"),
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
}
"""Suffix -> writer to an open file, given the names of the columns."""


def target(
    out: Path | None, json_file: Path | None, data: str | None
) -> tuple[Path | None, str] | None:
    """Return the file of --out or --json and its format; None if neither is given.

    `--json -` is no file: standard output.

    Raises:
        UserError: If both are given, --out has no known suffix, or is the data file.
    """
    if json_file is not None:
        if out is not None:
            raise UserError(f"--out {out} and --json {json_file}: give one of them.")
        return (None if str(json_file) == "-" else json_file), ".jsonl"
    if out is None:
        return None
    suffix = out.suffix.lower()
    if suffix not in WRITERS:
        raise UserError(
            f"--out {out}: suffix {suffix!r} is none of {', '.join(WRITERS)}; rename "
            "it, or write JSON lines to standard output with --json -."
        )
    if data is not None and out.exists() and Path(data).exists() and out.samefile(data):
        raise UserError(f"--out {out} is the file of --data; choose another name.")
    return out, suffix


def write(
    predictor: Predictor, rows: Iterable[TextRow], path: Path | None, suffix: str
) -> None:
    """Write rows with their predictions; progress and notes go to standard error.

    A predicted column whose name the rows have already gets `predicted_` before it.
    The file is replaced atomically after the last row; a terminal or a pipe is written
    directly. None is standard output.

    Args:
        predictor: The model.
        rows: Those after the first thousands have no other columns.
        path: The file.
        suffix: Its format, a key of `WRITERS`.

    Raises:
        UserError: If there is no row, or the file cannot be written.
    """
    began, count, num_cut, first_cut = time.monotonic(), 0, 0, ""
    write_rows: Write | None = None
    output = contextlib.nullcontext(sys.stdout) if path is None else open_atomic(path)
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(output)
            advance = stack.enter_context(counter("predicting", "rows"))
            for part, predictions, cut in predictor.predict_rows(rows, advance):
                if write_rows is None:
                    columns = dict.fromkeys(n for row in part for n in row.columns)
                    names = {name: _unused(name, columns) for name in predictions[0]}
                    write_rows = WRITERS[suffix](file, [*columns, *names.values()])
                _check_columns(part, columns)
                write_rows(
                    [
                        row.columns | {names[k]: v for k, v in prediction.items()}
                        for row, prediction in zip(part, predictions, strict=True)
                    ]
                )
                first_cut = first_cut or "".join(part[i].where for i in cut[:1])
                count, num_cut = count + len(part), num_cut + len(cut)
            if not count:
                raise UserError(_NO_TEXT)
    except OSError as error:
        if path is None:
            raise
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    rate = f"{count / (time.monotonic() - began):,.0f} rows/s"
    lines = [f"{format_count(count, 'row')}, {rate}, {predictor.precision}"]
    for line in (*lines, *_cut_notes(num_cut, first_cut)):
        print(line, file=sys.stderr, flush=True)


def _unused(name: str, columns: Collection[str]) -> str:
    return _unused(f"predicted_{name}", columns) if name in columns else name


def _check_columns(rows: Sequence[TextRow], columns: Mapping[str, None]) -> None:
    for row in rows:
        if more := row.columns.keys() - columns.keys():
            raise UserError(
                f"{row.where} has {min(more)!r}, which the first rows lack; add it to "
                "one of them, as null."
            )


def table(predictor: Predictor, rows: Iterable[TextRow]) -> Table:
    """Return the predictions of the first rows, for a terminal."""
    head = list(itertools.islice(rows, PREVIEW + 1))
    if not head:
        raise UserError(_NO_TEXT)
    ((part, predictions, cut),) = predictor.predict_rows(head[:PREVIEW])
    cells = [
        (*itertools.starmap(_words, prediction.items()), row.text)
        for row, prediction in zip(part, predictions, strict=True)
    ]
    notes = _cut_notes(len(cut), head[cut[0]].where if cut else "")
    if len(head) > PREVIEW:
        notes.append(f"the first {PREVIEW} rows; --out FILE writes all of them")
    return Table("Predictions", (*predictions[0], "text"), (*cells,), (*notes,))


def _words(name: str, value: Any) -> Any:  # noqa: ANN401 - a prediction
    """Return a value, labels or entities as one cell of a table."""
    if name == "value":  # in the label's unit, so tiny or huge
        return f"{value:.6g}"
    if not isinstance(value, list):
        return value
    words = (v if isinstance(v, str) else f"{v['text']} ({v['label']})" for v in value)
    return ", ".join(words) or None


def _cut_notes(count: int, where: str) -> list[str]:
    texts = format_count(count, "text was", "texts were")
    note = f"{texts} cut at --max-length of the run, the first in {where}"
    return [note] if count else []

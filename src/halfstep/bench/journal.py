"""Writes measurements as they are taken, so that an interrupted bench still has them.

While the bench runs, JSON lines are written next to the `--json` file; if it fails, a
table of them is printed.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting import json_fields
from halfstep.reporting.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO


class Journal:
    """The measurements of one bench, and optionally a file for JSON lines."""

    def __init__(self, file: TextIO | None) -> None:
        self.file = file
        self.values: dict[tuple[str, str], list[float]] = {}
        """(name, figure) -> its numbers, in the order of measurement."""

    def record(self, name: str, figures: dict[str, Any]) -> None:
        """Write a measurement; store its numbers by name and figure."""
        for figure, value in figures.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.values.setdefault((name, figure), []).append(float(value))
        if self.file is not None:
            line = json.dumps({"name": name} | json_fields.plain(figures))
            print(line, file=self.file, flush=True)

    def seconds(self) -> dict[str, list[float]]:
        """Return the times by name."""
        return {name: v for (name, f), v in self.values.items() if f == "seconds"}

    def table(self) -> Table:
        """Return the medians of the measurements."""
        rows = tuple(
            (name, figure, len(samples), statistics.median(samples))
            for (name, figure), samples in self.values.items()
        )
        more = [f"each measurement: {self.file.name}"] if self.file else []
        columns = ("what", "figure", "times", "median")
        notes = ("the bench did not finish", *more)
        return Table("Measured so far", columns, rows, notes, digits=6)


_open_journals: list[Journal] = []


@contextlib.contextmanager
def open_journal(json_file: Path | None) -> Iterator[Journal]:
    """Record measurements during this context.

    If the bench fails or is interrupted, they are printed on standard error, and the
    JSON lines stay in `FILE.part`, unless `--json` is a pipe or standard output;
    otherwise that file is deleted.

    Raises:
        UserError: If the file cannot be written: before hours of measuring, not after.
    """
    part = None
    # No file can be created next to a device or a pipe.
    is_special = json_file and json_file.exists() and not json_file.is_file()
    if json_file and str(json_file) != "-" and not is_special:
        part = json_file.with_name(f"{json_file.name}.part")
    try:
        file = part.open("w", encoding="utf-8") if part else None
    except OSError as error:
        raise UserError(
            f"--json {json_file} cannot be written: {error.strerror}."
        ) from error
    journal = Journal(file)
    _open_journals.append(journal)
    finished = False
    try:
        yield journal
        finished = True
    finally:
        _open_journals.remove(journal)
        if file is not None:
            file.close()
        if part is not None and finished:
            part.unlink(missing_ok=True)
        if not finished and journal.values:
            print(journal.table().text(), file=sys.stderr, flush=True)


def record(name: str, **figures: Any) -> None:  # noqa: ANN401 -- what JSON has
    """Record a measurement, as JSON values by name, in the running benches."""
    for journal in _open_journals:
        journal.record(name, figures)

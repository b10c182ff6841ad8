"""What a bench has measured so far: kept as it comes, whatever happens next.

In: names and figures, one measurement at a time. Out: lines of JSON beside the file of
`--json` while the bench runs; and where it fails, a table of all that it had.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Journal:
    """The measurements of one bench.

    Args:
        path: Gets a line of JSON for each measurement; None writes nothing.

    Raises:
        UserError: If it cannot be written: before hours of measuring, not after.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entries: list[tuple[str, dict[str, Any]]] = []
        self._file = None
        if path is not None:
            try:
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                file = path.with_suffix("")  # without .part
                message = f"--json {file} cannot be written: {error.strerror}."
                raise UserError(message) from error

    def record(self, name: str, figures: dict[str, Any]) -> None:
        """Keep a measurement."""
        # JSON has no nan and no infinity.
        figures = {
            key: str(value)
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for key, value in figures.items()
        }
        self.entries.append((name, figures))
        if self._file is not None:
            print(json.dumps({"name": name} | figures), file=self._file, flush=True)

    def close(self, *, finished: bool) -> None:
        """Close the file; delete it where the tables have been written."""
        if self._file is not None and self.path is not None:
            self._file.close()
            if finished:
                self.path.unlink(missing_ok=True)

    def table(self) -> Table:
        """Return the medians of what was measured, by name and figure."""
        values: dict[tuple[str, str], list[float]] = {}
        for name, figures in self.entries:
            for figure, value in figures.items():
                if isinstance(value, int | float):
                    values.setdefault((name, figure), []).append(float(value))
        rows = tuple(
            (name, figure, len(samples), statistics.median(samples))
            for (name, figure), samples in values.items()
        )
        notes = (
            "the bench did not finish",
            *([f"each measurement: {self.path}"] if self.path else []),
        )
        columns = ("what", "figure", "times", "median")
        return Table("Measured so far", columns, rows, notes, digits=6)


_open_journals: list[Journal] = []


@contextlib.contextmanager
def open_journal(json_file: Path | None) -> Iterator[None]:
    """Keep what is measured meanwhile.

    A bench that fails, or is interrupted, prints it on standard error, and leaves the
    lines of JSON in `FILE.part`; one that ends has written its tables, and leaves none.

    Args:
        json_file: Of `--json`. Of a pipe or standard output there is no part.

    Raises:
        UserError: If the file cannot be written.
    """
    place = None
    if json_file and str(json_file) != "-" and not _is_special(json_file):
        place = json_file.with_name(f"{json_file.name}.part")
    journal = Journal(place)
    _open_journals.append(journal)
    finished = False
    try:
        yield
        finished = True
    finally:
        _open_journals.remove(journal)
        journal.close(finished=finished)
        if not finished and journal.entries:
            print(journal.table().text(), file=sys.stderr, flush=True)


def _is_special(file: Path) -> bool:
    """Say whether a file is a device or a pipe, beside which none is to be made."""
    return file.exists() and not file.is_file()


def record(name: str, **figures: Any) -> None:  # noqa: ANN401 -- what JSON has
    """Keep a measurement, where a bench is running.

    Args:
        name: What was measured.
        figures: Plain values.
    """
    for journal in _open_journals:
        journal.record(name, figures)

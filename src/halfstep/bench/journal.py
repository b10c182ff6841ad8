"""What a bench has measured so far, written as it is measured.

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
    from typing import TextIO


class _Journal:
    """The measurements of one bench; a file gets a line of JSON for each."""

    def __init__(self, file: TextIO | None) -> None:
        self.file = file
        self.values: dict[tuple[str, str], list[float]] = {}

    def record(self, name: str, figures: dict[str, Any]) -> None:
        """Write a measurement; keep its numbers by name and figure."""
        for figure, value in figures.items():
            if isinstance(value, int | float):
                if math.isfinite(value):
                    self.values.setdefault((name, figure), []).append(float(value))
                else:  # JSON has no nan and no infinity
                    figures = figures | {figure: str(value)}
        if self.file is not None:
            print(json.dumps({"name": name} | figures), file=self.file, flush=True)

    def table(self) -> Table:
        """Return the medians of what was measured."""
        rows = tuple(
            (name, figure, len(samples), statistics.median(samples))
            for (name, figure), samples in self.values.items()
        )
        more = [f"each measurement: {self.file.name}"] if self.file else []
        columns = ("what", "figure", "times", "median")
        notes = ("the bench did not finish", *more)
        return Table("Measured so far", columns, rows, notes, digits=6)


_open_journals: list[_Journal] = []


@contextlib.contextmanager
def open_journal(json_file: Path | None) -> Iterator[None]:
    """Write down what is measured meanwhile.

    A bench that fails, or is interrupted, prints it on standard error, and leaves the
    lines of JSON in `FILE.part`; one that ends has written its tables, and leaves none.

    Args:
        json_file: Of `--json`. Of a pipe or standard output there is no part.

    Raises:
        UserError: If the file cannot be written: before hours of measuring, not after.
    """
    part = None
    # Beside a device or a pipe no file can be made.
    is_special = json_file and json_file.exists() and not json_file.is_file()
    if json_file and str(json_file) != "-" and not is_special:
        part = json_file.with_name(f"{json_file.name}.part")
    try:
        file = part.open("w", encoding="utf-8") if part else None
    except OSError as error:
        message = f"--json {json_file} cannot be written: {error.strerror}."
        raise UserError(message) from error
    journal = _Journal(file)
    _open_journals.append(journal)
    finished = False
    try:
        yield
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
    """Write down a measurement, plain values by name, where a bench is running."""
    for journal in _open_journals:
        journal.record(name, figures)

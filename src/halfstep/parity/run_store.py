"""Stores finished runs as JSON lines, so that a comparison can be continued."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.parity.training_run import Run
from halfstep.reporting.table import format_count, write_text

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_DAMAGE = ArithmeticError, LookupError, RecursionError, TypeError, ValueError


class RunStore:
    """The finished runs of comparisons: FOLDER/runs.jsonl, a line each.

    A line holds the settings that all runs of a comparison share, as JSON values, and
    a run. With folder None nothing is stored.

    Raises:
        UserError: If the file cannot be read or written.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, settings: Mapping[str, Any]
    ) -> None:
        self._file = None if folder is None else Path(folder) / "runs.jsonl"
        self._settings = dict(settings)
        self._lines: list[str] = []
        self.runs: dict[tuple[str, int], Run] = {}
        """(level, seed) -> the last run with these settings."""
        if self._file is None:
            return
        try:
            text = self._file.read_text("utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                f"{self._file} cannot be read: {error.strerror or error}."
            ) from error
        self._lines = text.splitlines()
        for line in self._lines:
            # A run whose line is damaged is trained again.
            with contextlib.suppress(*_DAMAGE):
                data = json.loads(line)
                if data["settings"] == self._settings:
                    run = Run.from_data(data["run"], self._settings["steps"])
                    self.runs[run.level, run.seed] = run

    def save(self, run: Run) -> None:
        """Store a finished run; the file is replaced, so that no line is half one."""
        if self._file is None:
            return
        data = {"settings": self._settings, "run": run.data()}
        self._lines.append(json.dumps(data, allow_nan=False))
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, "\n".join(self._lines) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._file} cannot be written: {error.strerror or error}. "
                f"{format_count(len(self.runs), 'finished run')} stored there: call "
                "again with the same folder to continue."
            ) from error
        self.runs[run.level, run.seed] = run

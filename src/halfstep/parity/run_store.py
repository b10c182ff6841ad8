"""Stores finished runs as JSON lines, so that a comparison can be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.parity.training_run import Run
from halfstep.reporting.table import format_count, write_text

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from halfstep.parity.candidate import Candidate


class RunStore:
    """The finished runs of a comparison: FOLDER/runs.jsonl.

    The first line has the settings that all runs share, as JSON values; then each
    finished run has a line. With folder None nothing is stored.

    Raises:
        UserError: If the file cannot be read or written, or has runs of other settings.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, settings: Mapping[str, Any]
    ) -> None:
        self._file = None if folder is None else Path(folder) / "runs.jsonl"
        self._runs: dict[tuple[str, int], Run] = {}
        self._lines: list[str] = []
        for number, line in enumerate(self._stored_lines()):
            try:
                data = dict(json.loads(line))
                if number:
                    run = Run.from_data(data)
                    self._runs[run.level, run.seed] = run
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                remedy = "delete it to train again" if number else "use another folder"
                raise UserError(
                    f"{self._file}: line {number + 1} is damaged "
                    f"({str(error).rstrip('.')}); {remedy}."
                ) from error
            if not number:
                _check_settings(folder, data, settings)
            self._lines.append(line)
        if not self._lines:
            self._write(settings)

    def load(self, candidate: Candidate, seed: int) -> Run | None:
        """Return a stored run, or None."""
        return self._runs.get((candidate.name, seed))

    def save(self, run: Run) -> None:
        """Store a finished run."""
        self._write(run.data())
        self._runs[run.level, run.seed] = run

    def _stored_lines(self) -> list[str]:
        if self._file is None:
            return []
        try:
            return self._file.read_text("utf-8", errors="replace").split("\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"{self._file} cannot be read: {error.strerror or error}."
            ) from error

    def _write(self, data: Mapping[str, Any]) -> None:
        """Add a line; the whole file is replaced, so that no line is ever half one."""
        if self._file is None:
            return
        self._lines.append(json.dumps(data, allow_nan=False))
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, "\n".join(self._lines) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._file} cannot be written: {error.strerror or error}. "
                f"{format_count(len(self._runs), 'finished run')} stored there: call "
                "again with the same folder to continue."
            ) from error


def _check_settings(
    folder: object, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    for name in {**settings, **stored}:
        if stored.get(name) != settings.get(name):
            raise UserError(
                f"{folder} holds runs with {name}={stored.get(name)}, not "
                f"{settings.get(name)}; use that, or choose another folder."
            )

"""Stores finished runs as JSON in a folder, so that a comparison can be continued."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halfstep.errors import UserError
from halfstep.parity.training_run import Run
from halfstep.reporting import json_fields
from halfstep.reporting.table import format_count, write_text

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from halfstep.parity.candidate import Candidate

T = TypeVar("T")
_SETTINGS = "settings.json"
_CHECKSUM = "crc32"


class RunStore:
    """The finished runs of a comparison: FOLDER/runs/LEVEL-seed-N.json.

    All runs in a folder share the settings, which are JSON values. With folder None
    nothing is stored.

    Raises:
        UserError: If the folder cannot be written, or holds runs of other settings.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, settings: Mapping[str, Any]
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        stored = self._read(_SETTINGS, dict, "choose another folder")
        if stored is None and self._num_runs():
            raise UserError(
                f"{folder} holds runs without {_SETTINGS}, so that their settings are "
                "unknown; choose another folder."
            )
        for name in {**settings, **(stored or {})}:
            if stored is not None and stored.get(name) != settings.get(name):
                raise UserError(
                    f"{folder} holds runs with {name}={stored.get(name)}, not "
                    f"{settings.get(name)}; use that, or choose another folder."
                )
        if stored is None:
            self._write(_SETTINGS, settings)

    def load(self, candidate: Candidate, seed: int) -> Run | None:
        """Return a stored run, or None."""

        def convert(data: dict[str, Any]) -> Run:
            checksum = data.pop(_CHECKSUM)
            if checksum != _checksum(data):
                raise ValueError(f"its {_CHECKSUM} is {checksum}")
            run = Run.from_data(data)
            if (run.level, run.seed) != (candidate.name, seed):
                raise ValueError(f"it is of {run.level}, seed {run.seed}")
            return run

        return self._read(_name(candidate, seed), convert, "delete it to train again")

    def save(self, candidate: Candidate, run: Run) -> None:
        """Store a finished run."""
        data = run.data()
        data[_CHECKSUM] = _checksum(data)
        self._write(_name(candidate, run.seed), data)

    def _read(
        self, name: str, convert: Callable[[dict[str, Any]], T], remedy: str
    ) -> T | None:
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            text = path.read_text(encoding="utf-8")
            return convert(dict(json_fields.mapping(json.loads(text), name)))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror or error}."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is damaged ({str(error).rstrip('.')}); {remedy}."
            ) from error

    def _num_runs(self) -> int:
        return len([*self._folder.glob("runs/*.json")]) if self._folder else 0

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror or error}. "
                f"{format_count(self._num_runs(), 'finished run')} stored there: call "
                "again with the same folder to continue."
            ) from error


def _name(candidate: Candidate, seed: int) -> str:
    # A colon is not allowed in names of files on Windows.
    return f"runs/{candidate.name.replace(':', '+')}-seed-{seed}.json"


def _checksum(data: Mapping[str, Any]) -> int:
    """Return a CRC-32 of JSON values, the same after they were written and read."""
    return zlib.crc32(json.dumps(data).encode())

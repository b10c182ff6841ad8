"""The folder of a run: settings, metrics, checkpoints, and what may be written there.

In: settings and records. Out: `config.json`, `metrics.jsonl`, `checkpoints/` with the
pointers `last.json` and `best.json`. Only the first process writes.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep import checkpoint
from halfstep.errors import UserError
from halfstep.report import write_text
from halfstep.train.text import without_bars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_OWN = ("config.json", "metrics.jsonl", "summary.json", "report.html")
_OWN_FOLDERS = ("checkpoints", "model")


def finite(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    """Return a value for JSON, which has no inf and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@dataclass(frozen=True)
class RunFolder:
    """Where a run lives."""

    path: Path

    @property
    def model(self) -> Path:
        """The finished model, as transformers loads it."""
        return self.path / "model"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder and write the settings.

        Raises:
            UserError: If it holds a run already and `overwrite` is not asked for, or
                cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = [
                name for name in (*_OWN, *_OWN_FOLDERS) if (self.path / name).exists()
            ]
            if held and not overwrite:
                message = (
                    f"{self.path} already holds a run ({held[0]}); add --resume to go "
                    "on with it, --overwrite to replace it, or choose another --out."
                )
                raise UserError(message)
            if held:
                self._check_own()
            for name in _OWN:
                (self.path / name).unlink(missing_ok=True)
            for name in _OWN_FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            self._checkpoints.mkdir(parents=True)
            write_text(self.path / "config.json", json.dumps(dict(settings), indent=1))
        except OSError as error:
            message = (
                f"--out {self.path} cannot be written: {error.strerror or error}; "
                "choose another folder."
            )
            raise UserError(message) from error

    def _check_own(self) -> None:
        """Refuse to replace what no run of ours has written."""
        try:
            ours = {"model", "level", "dtype", "out"} <= self.settings().keys()
        except UserError:
            ours = False
        if not ours:
            message = (
                f"--overwrite: {self.path} holds files of these names that are not a "
                "halfstep run's; choose another --out."
            )
            raise UserError(message)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run that is there.

        Raises:
            UserError: If there is no run, or its settings are damaged.
        """
        path = self.path / "config.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"--resume: {self.path} holds no run; it has no config.json."
            raise UserError(message) from error
        except ValueError as error:
            message = f"--resume: {path} is damaged: it is not valid JSON."
            raise UserError(message) from error
        if not isinstance(found, dict):
            message = f"--resume: {path} is damaged: it holds no settings."
            raise UserError(message)
        return found

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics; a last line torn by a crash is left out.

        Raises:
            UserError: If any other line is damaged.
        """
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_bytes().split(b"\n")
        found = []
        # What follows the last line end is empty, or torn.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                record["step"] + 0
            except (ValueError, TypeError, KeyError) as error:
                message = (
                    f"{self.metrics} line {number} is damaged: it is not a record of a "
                    "step. Remove the line, or start anew with another --out."
                )
                raise UserError(message) from error
            found.append(record)
        return found

    def rewind(self, step: int) -> None:
        """Drop metrics after a step: they will be written again."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any],
        notes: Mapping[str, Any],
        *,
        best: bool,
    ) -> None:
        """Write a checkpoint, point to it, and delete those that nothing points to."""
        target = self._checkpoints / f"step-{step:08d}"
        if target.exists():
            # A run that was stopped after this rename and before the pointer moved.
            shutil.rmtree(target)
        checkpoint.save(target, weights, state, notes)
        # The best first: a run that is killed in between resumes from the checkpoint
        # before, comes here again, and ends with the same best.
        if best:
            checkpoint.point(self._checkpoints / "best.json", target)
        checkpoint.point(self._checkpoints / "last.json", target)
        kept = {self.last(), self.best()}
        for other in self._checkpoints.iterdir():
            if other.is_dir() and other not in kept:
                shutil.rmtree(other)

    def last(self) -> Path:
        """Return the newest checkpoint."""
        return checkpoint.follow(self._checkpoints / "last.json")

    def best(self) -> Path:
        """Return the checkpoint that did best on the dev split."""
        return checkpoint.follow(self._checkpoints / "best.json")

    def has_checkpoint(self) -> bool:
        """Say whether a checkpoint was ever finished.

        Raises:
            UserError: If there are checkpoints, and nothing that names the last.
        """
        if (self._checkpoints / "last.json").exists():
            return True
        # A run killed while it saved for the first time has logged one evaluation.
        evaluated = [r["step"] for r in self.records() if r.get("event") == "eval"]
        if len(evaluated) > 1:
            message = (
                f"{self._checkpoints} has lost last.json, which names the checkpoint "
                "to resume from; restore it, or start anew with another --out."
            )
            raise UserError(message)
        return False

    def publish_model(self, model: Any, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the finished model for transformers; whole or not at all."""
        part = self.path / ".model.part"
        shutil.rmtree(part, ignore_errors=True)
        with without_bars():
            model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.rmtree(self.model, ignore_errors=True)
        part.rename(self.model)

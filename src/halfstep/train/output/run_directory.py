"""The folder of a run: settings, metrics, checkpoints, and what may be written there.

In: settings and records. Out: `config.json`, `launch.json`, `metrics.jsonl`, and
`checkpoints/step-00000012`, whose names and manifests alone tell which is the newest
and which the best. Only the first process writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

import filelock

from halfstep.checkpoint import atomic_directory, single
from halfstep.checkpoint.single import CheckpointError
from halfstep.errors import UserError
from halfstep.reporting.table import write_text
from halfstep.train import torchrun
from halfstep.train.data import file_lock
from halfstep.train.model import without_progress_bars
from halfstep.train.output import jsonl
from halfstep.train.output.jsonl import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

T = TypeVar("T")

__all__ = ["RunFolder", "finite"]

_OWN_FOLDERS = ("checkpoints", "model", "tensorboard")
_OWN = (
    *("metrics.jsonl", "summary.json", "report.html"),
    *("environment.json", "profile.json", "data.json"),
    # What tells that the others are a run's goes last.
    *("launch.json", "resolved.toml", "config.json"),
)
_SET_ASIDE = "damaged-"
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
"""What `write_text` calls a file that is not whole yet."""


class RunFolder:
    """Where a run lives.

    Attributes:
        model: The finished model, as transformers loads it.
        metrics: One JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self._config = path / "config.json"
        self._checkpoints = path / "checkpoints"

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder and write the settings, and who has begun the run.

        Raises:
            UserError: If it holds a run already and `overwrite` is not asked for, or
                other files and no run, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            old = [name for name in (*_OWN, *_OWN_FOLDERS) if self._holds(name)]
            began = bool(old)
            if began and not overwrite:
                message = (
                    f"{self.path} already holds a run ({old[-1]}); add --resume to go "
                    "on with it, --overwrite to replace it, or choose another --out."
                )
                raise UserError(message)
            if began:
                self._check_is_run()
            else:
                self.check_no_foreign_files()
            self._sweep()
            for name in (*_OWN_FOLDERS, *_OWN):
                atomic_directory.remove(self.path / name)
            # In this order some flag accepts what a kill leaves, wherever it comes.
            write_text(self.path / "launch.json", json.dumps(torchrun.identity()))
            write_text(self._config, json.dumps(dict(settings), indent=1))
            self._checkpoints.mkdir(parents=True)
            atomic_directory.flush(self.path)
            with contextlib.suppress(PermissionError):  # it may be another user's
                atomic_directory.flush(self.path.parent)
        except OSError as error:
            raise self._unwritable(error) from error

    def check_no_foreign_files(self) -> None:
        """Refuse a folder that holds files of another program.

        Hidden files do not count, nor what a file system puts on a new disk.
        """
        ours = {*_OWN, *_OWN_FOLDERS, "lost+found"}
        names = sorted(path.name for path in self.path.iterdir())
        foreign = [name for name in names if name not in ours and name[0] != "."]
        if foreign:
            message = (
                f"--out {self.path} is not empty ({foreign[0]}) and holds no run; "
                "choose a new folder, or an empty one."
            )
            raise UserError(message)

    def _unwritable(self, error: OSError) -> UserError:
        why = atomic_directory.os_reason(error)
        message = f"--out {self.path} cannot be written: {why}; choose another folder."
        return UserError(message)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other programs out of the folder, which is made if need be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = file_lock.acquire(self.path / ".lock", timeout=0)
        except filelock.Timeout:
            message = (
                f"{self.path} is in use by another program; wait for it, or stop it."
            )
            raise UserError(message) from None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _holds(self, name: str) -> bool:
        """Say whether something of a run is there: not its launch, no empty folder."""
        path = self.path / name
        if path.is_dir() and name in _OWN_FOLDERS:
            return any(path.iterdir())
        return os.path.lexists(path) and name != "launch.json"

    def resumes_after_restart(self) -> bool:
        """Say whether torchrun has restarted the processes that began this run.

        Why: after a failure torchrun starts the same command again, without --resume.
        What this very launch has begun it must go on with; whatever else is in the
        folder it must not.
        """
        if not self._config.exists():
            return False
        return torchrun.is_restart_of(torchrun.read_identity(self.path / "launch.json"))

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run that is there."""
        try:
            content = json.loads(self._config.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"{self.path} holds no run; it has no config.json."
            raise UserError(message) from error
        except ValueError:
            content = None
        if not isinstance(content, dict):
            message = f"{self._config} is damaged: it holds no settings."
            raise UserError(message)
        return content

    def _check_is_run(self) -> None:
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

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics, whole or, if the disk is full, torn at its end."""
        with self.writing(self.metrics), self.metrics.open("a") as file:
            file.write(jsonl.to_lines([record]))

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics; a last line torn by a crash is left out."""
        return jsonl.read(self.metrics)

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint: drop metrics after it, which will be written again.

        Checkpoints after it are those that were not whole. They are set aside, under a
        name beside theirs, so that none counts as the newest or stands in the way.
        """
        records = [record for record in self.records() if record["step"] <= step]
        with self.writing(self.path):
            self._sweep()
            write_text(self.metrics, jsonl.to_lines(records))
            for later in (each for each in self.steps() if each > step):
                path = self.checkpoint_path(later)
                aside = path.with_name(_SET_ASIDE + path.name)
                atomic_directory.remove(aside)
                path.rename(aside)

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        for path in self.path.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                atomic_directory.remove(path)
        atomic_directory.remove_leftovers(self.path, self.model.name)
        atomic_directory.remove_leftovers(self._checkpoints)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, in one piece."""
        with self.writing(self.path / name):
            write_text(self.path / name, text)

    def checkpoint_path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or will be."""
        return self._checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, whole or not, the newest first."""
        try:
            names = [each.name for each in self._checkpoints.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any],
        notes: Mapping[str, Any],
    ) -> None:
        """Write the checkpoint of a step; one that is there already is replaced."""
        path = self.checkpoint_path(step)
        with self.writing(path):
            single.save(path, weights, state, notes, replace=True)

    def newest(self, load: Callable[[Path], T]) -> tuple[T, list[str]] | None:
        """Load the newest checkpoint that is whole.

        Returns:
            What was loaded, and a line for each newer checkpoint that is damaged. None
            if no checkpoint was ever finished.

        Raises:
            UserError: If there are checkpoints, and none is whole; or whatever else
                `load` raises.
        """
        with self.writing(self._checkpoints):
            atomic_directory.restore_replaced(self._checkpoints)
        if not self.has_checkpoint():
            return None
        faults: list[str] = []
        for step in self.steps():
            try:
                return load(self.checkpoint_path(step)), faults
            except CheckpointError as error:
                faults.append(f"the checkpoint of step {step} is not used: {error}")
        names = ", ".join(self.checkpoint_path(step).name for step in self.steps())
        message = (
            f"no checkpoint in {self._checkpoints} can be used ({names}); restore one, "
            "or start anew with another --out. Of the newest: "
            f"{faults[0].partition(': ')[2]}"
        )
        raise UserError(message)

    def has_checkpoint(self) -> bool:
        """Say whether a checkpoint was ever finished, damaged since or not."""
        if self.steps():
            return True
        # A run killed while it saved for the first time has logged one evaluation.
        evaluated = [r["step"] for r in self.records() if r.get("event") == "eval"]
        if len(evaluated) > 1:
            message = (
                f"{self._checkpoints} has lost its checkpoints: metrics.jsonl tells of "
                f"{len(evaluated)} evaluations. Restore them, or start anew with "
                "another --out."
            )
            raise UserError(message)
        return False

    def prune(self, keep: int) -> None:
        """Delete checkpoints but the newest, and the best that each of these names.

        One with a manifest that cannot be read is neither counted nor deleted: why it
        is damaged may be of interest.
        """
        intact: list[int] = []
        wanted: set[int] = set()
        for step in self.steps():
            try:
                notes = atomic_directory.read(self.checkpoint_path(step))["notes"]
            except CheckpointError:
                wanted.add(step)
                continue
            if len(intact) < keep:
                wanted |= {step, notes.get("best_step", step)}
            intact.append(step)
        with self.writing(self._checkpoints):
            for step in set(intact) - wanted:
                atomic_directory.discard(self.checkpoint_path(step))

    def save_model(self, model: Any, tokenizer: Any) -> None:  # noqa: ANN401
        """Write the finished model for transformers, sealed; whole or not at all."""

        def fill(part: Path) -> dict[str, Any]:
            with without_progress_bars():
                model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            return {"notes": {}}

        with self.writing(self.model):
            atomic_directory.write(
                self.model, atomic_directory.MODEL, fill, replace=True
            )

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Report what the disk refuses as a `UserError`, and how to go on."""
        try:
            yield
        except Exception as error:
            reason = atomic_directory.os_reason(error)
            if isinstance(error, atomic_directory.CheckpointWriteError):
                reason = error.reason
            if reason is None:
                raise
            message = (
                f"{path} could not be written: {reason}. Fix that, then go on with "
                "--resume."
            )
            raise UserError(message) from error

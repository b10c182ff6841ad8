"""The folder of a run: settings, metrics, checkpoints, model; and its locking.

It holds `config.json`, `launch.json`, `metrics.jsonl`, and checkpoints such as
`checkpoints/step-00000012`. Names and manifests of these suffice to find the newest and
the best one. Only the first rank writes, except for shards of checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import filelock

from halfstep.checkpoint import atomic_directory
from halfstep.checkpoint.single import CheckpointError
from halfstep.errors import UserError
from halfstep.reporting import json_fields
from halfstep.reporting.table import write_text
from halfstep.train import torchrun
from halfstep.train.model import without_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")

_OWN_FOLDERS = ("checkpoints", "model", "tensorboard")
_OWN = (
    *("metrics.jsonl", "summary.json", "report.html"),
    *("environment.json", "profile.json"),
    # The files that identify the folder as a run's are deleted last.
    *("launch.json", "resolved.toml", "config.json"),
)
_SET_ASIDE = "damaged-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
"""Names of the temporary files of `write_text`."""


finite = partial(json_fields.plain, spell=lambda _: None)
"""Replaces inf and NaN, which JSON lacks, by None."""


def _json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(finite(r), allow_nan=False) + "\n" for r in records)


def _acquire_lock(path: Path) -> filelock.BaseFileLock | None:
    """Create a file if needed and lock it; None if the file system has no locks.

    filelock's own fallback for such network file systems is disabled: it leaves a lock
    file behind when the process is killed.

    Raises:
        filelock.Timeout: If another process holds the lock.
        OSError: If the file cannot be opened for writing.
    """
    lock = filelock.FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return lock


class RunFolder:
    """The folder of a run.

    Attributes:
        model: Folder of the final model, in the format of transformers.
        metrics: File of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self._config = path / "config.json"
        self._checkpoints = path / "checkpoints"

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Create the folder; write the settings and the identity of this launch.

        Raises:
            UserError: If it holds a run and `overwrite` is False, or holds files but no
                run, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            old = [name for name in (*_OWN, *_OWN_FOLDERS) if self._holds(name)]
            began = bool(old)
            if began and not overwrite:
                raise UserError(
                    f"{self.path} already holds a run ({old[-1]}); add --resume to go "
                    "on with it, --overwrite to replace it, or choose another --out."
                )
            if began:
                self._check_is_run()
            else:
                self.check_no_foreign_files()
            self._sweep()
            for name in (*_OWN_FOLDERS, *_OWN):
                atomic_directory.remove(self.path / name)
            # In this order, a kill at any point leaves a folder that some flag accepts.
            write_text(self.path / "launch.json", json.dumps(torchrun.identity()))
            write_text(self._config, json.dumps(dict(settings), indent=1))
            self._checkpoints.mkdir(parents=True)
            atomic_directory.flush(self.path)
            with contextlib.suppress(PermissionError):  # its owner may be another user
                atomic_directory.flush(self.path.parent)
        except OSError as error:
            raise self._unwritable(error) from error

    def check_no_foreign_files(self) -> None:
        """Raise UserError if the folder holds files of another program.

        Hidden files and lost+found do not count.
        """
        ours = {*_OWN, *_OWN_FOLDERS, "lost+found"}
        names = sorted(path.name for path in self.path.iterdir())
        foreign = [name for name in names if name not in ours and name[0] != "."]
        if foreign:
            raise UserError(
                f"--out {self.path} is not empty ({foreign[0]}) and holds no run; "
                "choose a new folder, or an empty one."
            )

    def _unwritable(self, error: OSError) -> UserError:
        why = atomic_directory.os_reason(error)
        message = f"--out {self.path} cannot be written: {why}; choose another folder."
        return UserError(message)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; create it if needed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = _acquire_lock(self.path / ".lock")
        except filelock.Timeout:
            raise UserError(
                f"{self.path} is in use by another program; wait for it, or stop it."
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _holds(self, name: str) -> bool:
        """Return whether part of a run exists; not launch.json or an empty folder."""
        path = self.path / name
        if path.is_dir() and name in _OWN_FOLDERS:
            return any(path.iterdir())
        return os.path.lexists(path) and name != "launch.json"

    def resumes_after_restart(self) -> bool:
        """Return whether torchrun restarted the launch that began this run.

        After a failure torchrun runs the same command again, without --resume. A run
        begun by the same launch must be continued, any other run must not.
        """
        if not self._config.exists():
            return False
        return torchrun.is_restart_of(torchrun.read_identity(self.path / "launch.json"))

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run in the folder."""
        try:
            content = json.loads(self._config.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"{self.path} holds no run; it has no config.json."
            raise UserError(message) from error
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"{self._config} is damaged: it holds no settings.")
        return content

    def _check_is_run(self) -> None:
        """Raise UserError rather than replace files that no run has written."""
        try:
            ours = {"model", "level", "dtype", "out"} <= self.settings().keys()
        except UserError:
            ours = False
        if not ours:
            raise UserError(
                f"--overwrite: {self.path} holds files of these names that are not a "
                "halfstep run's; choose another --out."
            )

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to the metrics; if the disk is full, its end may be missing."""
        with self.writing(self.metrics), self.metrics.open("a") as file:
            file.write(_json_lines([record]))

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics, without a last line torn by a crash."""
        try:
            lines = self.metrics.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        records = []
        # After the last newline comes nothing, or a torn line.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                record["step"] + 0
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{self.metrics} line {number} is damaged: it is not a record of a "
                    "step. Remove the line, or start anew with another --out."
                ) from error
            records.append(record)
        return records

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint: drop metrics after it, which will be written again.

        Later checkpoints are damaged ones. They are renamed, so that none counts as the
        newest or blocks a new one.
        """
        records = [record for record in self.records() if record["step"] <= step]
        with self.writing(self.path):
            self._sweep()
            write_text(self.metrics, _json_lines(records))
            for later in (each for each in self.steps() if each > step):
                path = self.checkpoint_path(later)
                aside = path.with_name(_SET_ASIDE + path.name)
                atomic_directory.remove(aside)
                path.rename(aside)

    def _sweep(self) -> None:
        """Remove temporary files of processes that were killed while writing."""
        for path in self.path.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                atomic_directory.remove(path)
        atomic_directory.remove_leftovers(self.path, self.model.name)
        atomic_directory.remove_leftovers(self._checkpoints)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder atomically."""
        with self.writing(self.path / name):
            write_text(self.path / name, text)

    def checkpoint_path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self._checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or not, newest first."""
        try:
            names = [each.name for each in self._checkpoints.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self, load: Callable[[Path], T]) -> tuple[T, list[str]] | None:
        """Load the newest intact checkpoint; None if none was ever completed.

        Also returns a line for each newer, damaged one; raises UserError if all are.
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
        raise UserError(
            f"no checkpoint in {self._checkpoints} can be used ({names}); restore one, "
            "or start anew with another --out. Of the newest: "
            f"{faults[0].partition(': ')[2]}"
        )

    def has_checkpoint(self) -> bool:
        """Return whether a checkpoint was ever completed, even if damaged since."""
        if self.steps():
            return True
        # A run killed during its first save has logged one evaluation.
        evaluated = [r["step"] for r in self.records() if r.get("event") == "eval"]
        if len(evaluated) > 1:
            raise UserError(
                f"{self._checkpoints} has lost its checkpoints: metrics.jsonl tells of "
                f"{len(evaluated)} evaluations. Restore them, or start anew with "
                "another --out."
            )
        return False

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints and the best ones they name.

        Checkpoints with an unreadable manifest are neither counted nor deleted, so that
        the damage can be examined.
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
        """Write the final model for transformers, with checksums, atomically."""

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
        """Turn errors of the file system into a UserError that says how to go on."""
        try:
            yield
        except Exception as error:
            reason = atomic_directory.os_reason(error)
            if isinstance(error, atomic_directory.CheckpointWriteError):
                reason = error.reason
            if reason is None:
                raise
            raise UserError(
                f"{path} could not be written: {reason}. Fix that, then go on with "
                "--resume."
            ) from error

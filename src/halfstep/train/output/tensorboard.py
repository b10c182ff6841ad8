"""The run's numbers for TensorBoard, beside `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from halfstep.checkpoint import atomic_directory
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_SCALARS = ("loss", "lr", "scale", "grad_norm", "examples_per_s", "skipped_total")


class TensorBoardWriter:
    """Writes records as scalars, as long as the disk takes them.

    A disk that does not ends no run: that is said once, and no more is written.

    Args:
        folder: For the event files.
        step: The last step that counts; what an earlier run wrote after it is hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._writer: Any = None
        self._has_failed = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # tensorboard's own
            from torch.utils.tensorboard import SummaryWriter

            with self._warn_once_on_disk_error():
                self._writer = SummaryWriter(
                    str(folder), purge_step=step + 1 if step else None
                )

    @contextlib.contextmanager
    def _warn_once_on_disk_error(self) -> Iterator[None]:
        """Spare the run what the disk refuses; the first time, say so."""
        try:
            yield
        except OSError as error:
            had_failed, self._has_failed = self._has_failed, True
            if not had_failed:
                why = atomic_directory.os_reason(error)
                message = (
                    f"{self._folder} could not be written: {why}. "
                    "TensorBoard gets no more of this run; metrics.jsonl goes on."
                )
                warnings.warn(message, stacklevel=4)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write what a record holds."""
        if self._has_failed:
            return
        if record.get("event") == "eval":
            names = {k: k.replace("_", "/", 1) for k in record if k.startswith("dev_")}
        else:
            names = {key: f"train/{key}" for key in _SCALARS}
        with self._warn_once_on_disk_error():
            for key, name in names.items():
                if record.get(key) is not None:
                    self._writer.add_scalar(name, record[key], record["step"])

    def close(self) -> None:
        """Write what is left to the disk."""
        if self._writer is not None:
            with self._warn_once_on_disk_error():
                self._writer.close()


def check_installed() -> None:
    """Find TensorBoard's library before a run begins.

    Raises:
        UserError: If it is missing.
    """
    if find_spec("tensorboard") is None:
        message = (
            "--tensorboard needs the package tensorboard: install with pip install "
            "'halfstep[tensorboard]', or leave it out."
        )
        raise UserError(message)

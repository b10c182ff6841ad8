"""Writes a run's metrics for TensorBoard, besides `metrics.jsonl`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SCALARS = ("loss", "lr", "scale", "grad_norm", "examples_per_s", "skipped_total")


class TensorBoardWriter:
    """Writes records as scalars; hides what an earlier run wrote after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # tensorboard's
            from torch.utils.tensorboard import SummaryWriter

            first = step + 1 if step else None
            self._writer: Any = SummaryWriter(str(folder), purge_step=first)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the scalars of a record."""
        if record.get("event") == "eval":
            names = {k: k.replace("_", "/", 1) for k in record if k.startswith("dev_")}
        else:
            names = {key: f"train/{key}" for key in _SCALARS}
        for key, name in names.items():
            if record.get(key) is not None:
                self._writer.add_scalar(name, record[key], record["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

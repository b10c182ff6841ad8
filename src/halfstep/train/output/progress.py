"""Shows progress: a bar on a terminal, lines on a pipe, curves for TensorBoard."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from halfstep.reporting.table import printable, terminal_width, wrap

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LINES = 20
_LONGEST_SILENCE = 60.0  # seconds without a line of a step
_SCALARS = ("loss", "lr", "scale", "grad_norm", "examples_per_s", "skipped_total")


def progress(total: int, done: int, *, leads: bool) -> Progress:
    """Return the progress display for this rank and standard output."""
    if leads and sys.stdout.isatty():
        return _Live(total, done)
    return _Plain(total, done, leads=leads)


def _numbers(record: Mapping[str, Any]) -> str:
    parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}"]
    if record["scale"] != 1:
        parts.append(f"scale {record['scale']:g}")
    parts.append(f"skipped {record['skipped_total']}")
    parts.append(f"{record['examples_per_s']:.0f} examples/s")
    return "  ".join(parts)


class _Plain:
    """Lines on a pipe; none on ranks that do not lead."""

    def __init__(self, total: int, done: int, *, leads: bool) -> None:
        self._leads = leads
        self._total = total
        self._first = done
        self._every = max(1, total // _LINES)
        self._began = self._last_line = time.perf_counter()

    def step(self, record: Mapping[str, Any]) -> None:
        number, now = record["step"], time.perf_counter()
        is_due = now - self._last_line > _LONGEST_SILENCE
        if number % self._every and number != self._total and not is_due:
            return
        self._last_line = now
        spent = now - self._began
        left = spent / max(1, number - self._first) * (self._total - number)
        numbers = _numbers(record)
        self.print_line(f"step {number}/{self._total}  {numbers}  {left:.0f} s left")

    def print_line(self, line: str) -> None:
        if not self._leads:
            return
        # A closed pipe (`| head`) must not end the training.
        with contextlib.suppress(BrokenPipeError):
            print(*wrap(line, terminal_width()), sep="\n", flush=True)

    def close(self) -> None:
        pass


class _Live:
    """A tqdm bar on a terminal."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            initial=done,
            file=sys.stdout,
            bar_format="{n_fmt}/{total_fmt} {bar:20}{postfix} {remaining} left",
        )

    def step(self, record: Mapping[str, Any]) -> None:
        self._bar.set_postfix_str(_numbers(record), refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def print_line(self, line: str) -> None:
        self._bar.write(printable(line), file=sys.stdout)

    def close(self) -> None:
        self._bar.close()


Progress = _Plain | _Live
"""Progress display: `step` per step, `print_line` for lines that stay, `close`."""


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

"""The run's numbers in TensorBoard's files, read back by TensorBoard's own reader."""

from __future__ import annotations

import struct
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from small_training import write_letters

from halfstep.errors import UserError
from halfstep.train.loop import Trainer
from halfstep.train.output import tensorboard
from halfstep.train.output.tensorboard import TensorBoardWriter
from halfstep.train.run import run

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tensorboard")


def step(number: int, **more: object) -> dict[str, Any]:
    """Return the record of a step, as the loop writes it."""
    record = {"step": number, "loss": 1 / number, "lr": 1e-3, "grad_norm": 0.1}
    return record | {"scale": 65536.0, "skipped_total": 0, "seconds": 1.5} | more


def single(value: float) -> float:
    """Return a number as single precision holds it, which event files are in."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard would show: by name, step and value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tensorboard's own
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )

        found = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        return {
            name: [(each.step, each.value) for each in found.Scalars(name)]
            for name in found.Tags()["scalars"]
        }


def test_steps_and_evaluations(tmp_path: Path) -> None:
    """Law: what is shown of a record comes back under its name, at its step."""
    events = TensorBoardWriter(tmp_path, 0)
    for number in (1, 2, 3):
        events.write(step(number, examples_per_s=10.0 * number))
    events.write({"event": "eval", "step": 3, "dev_macro_f1": 0.7, "loss": 9.0})
    events.close()
    assert read(tmp_path) == {
        "train/loss": [(n, single(1 / n)) for n in (1, 2, 3)],
        "train/lr": [(n, single(1e-3)) for n in (1, 2, 3)],
        "train/grad_norm": [(n, single(0.1)) for n in (1, 2, 3)],
        "train/scale": [(n, 65536.0) for n in (1, 2, 3)],
        "train/skipped_total": [(n, 0.0) for n in (1, 2, 3)],
        "train/examples_per_s": [(n, 10.0 * n) for n in (1, 2, 3)],
        "dev/macro_f1": [(3, single(0.7))],
    }


def test_what_is_not_there(tmp_path: Path) -> None:
    """Law: a number that a step has not, or has not finite, makes no point."""
    events = TensorBoardWriter(tmp_path, 0)
    events.write({"step": 1, "loss": None, "lr": 0.5})
    events.write({"step": 2, "loss": 0.25, "scale": None})
    events.close()
    assert read(tmp_path) == {"train/lr": [(1, 0.5)], "train/loss": [(2, 0.25)]}


def test_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without the library a run does not begin, and how to get it is told."""
    tensorboard.check_installed()
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None if name else sys)
    with pytest.raises(UserError) as caught:
        tensorboard.check_installed()
    assert str(caught.value) == (
        "--tensorboard needs the package tensorboard: install with pip install "
        "'halfstep[tensorboard]', or in a checkout pip install -e '.[tensorboard]'; or "
        "leave it out."
    )


@pytest.mark.usefixtures("small_runs")
def test_a_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: TensorBoard shows the numbers of the run's records, each step once."""
    settings = {
        "data": str(write_letters(tmp_path)),
        "model": "mini",
        "level": "O2",
        "dtype": "bf16",
        "epochs": 2,
        "batch_size": 16,
        "eval_every": 4,
        "out": str(tmp_path / "run"),
        "tensorboard": True,
    }
    train_step = Trainer.train_step

    def broken(self: Trainer, *rest: Any) -> dict[str, Any]:
        if self.state.step == 6:
            raise KeyboardInterrupt
        return train_step(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", broken)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    time.sleep(1.0)  # files are read in the order of the seconds in their names
    # Steps 5 and 6 were written by the first run, and are taken again.
    records = run({"out": settings["out"]}, resume=True).folder.records()
    shown = read(tmp_path / "run" / "tensorboard")
    steps = [record for record in records if "event" not in record]
    assert len(steps) == 12
    for name in ("loss", "lr", "grad_norm"):
        told = [(record["step"], single(record[name])) for record in steps]
        assert shown[f"train/{name}"] == told, name
    told = [
        (record["step"], single(record["dev_accuracy"]))
        for record in records
        if record.get("event") == "eval"
    ]
    assert shown["dev/accuracy"] == told

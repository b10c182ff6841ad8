"""The run's numbers in TensorBoard's files, read back by TensorBoard's own reader."""

import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
from data_files import refused
from small_training import small_settings, write_letters

from halfstep.train import dependencies
from halfstep.train.output.progress import TensorBoardWriter
from halfstep.train.run import run

pytest.importorskip("tensorboard")


def step(number: int, **more: object) -> dict[str, Any]:
    record = {"step": number, "loss": 1 / number, "lr": 1e-3, "grad_norm": 0.1}
    return record | {"scale": 65536.0, "skipped_total": 0, "seconds": 1.5} | more


def single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
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
    """Law: what is shown of a record comes back under its name, at its step.

    A number that a step has not, or has not finite, makes no point.
    """
    events = TensorBoardWriter(tmp_path, 0)
    for number in (1, 2, 3):
        events.write(step(number, examples_per_s=10.0 * number))
    events.write({"event": "eval", "step": 3, "dev_macro_f1": 0.7, "loss": 9.0})
    events.write({"step": 4, "loss": None, "lr": 0.5})
    events.close()
    assert read(tmp_path) == {
        "train/loss": [(n, single(1 / n)) for n in (1, 2, 3)],
        "train/lr": [*((n, single(1e-3)) for n in (1, 2, 3)), (4, 0.5)],
        "train/grad_norm": [(n, single(0.1)) for n in (1, 2, 3)],
        "train/scale": [(n, 65536.0) for n in (1, 2, 3)],
        "train/skipped_total": [(n, 0.0) for n in (1, 2, 3)],
        "train/examples_per_s": [(n, 10.0 * n) for n in (1, 2, 3)],
        "dev/macro_f1": [(3, single(0.7))],
    }


def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    """Law: TensorBoard shows no step twice: those after the checkpoint are anew."""
    for last, numbers in ((0, (1, 2, 3)), (2, (3, 4))):
        events = TensorBoardWriter(tmp_path / str(last), last)
        for number in numbers:
            events.write({"step": number, "loss": float(number + last)})
        events.close()
        for file in (tmp_path / str(last)).iterdir():
            # Files are read in the order of the names, which begin with the second.
            file.rename(tmp_path / f"events.out.tfevents.{1000 + last}.{file.name}")
        (tmp_path / str(last)).rmdir()
    assert read(tmp_path) == {"train/loss": [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]}


@pytest.mark.usefixtures("small_runs")
def test_a_run(tmp_path: Path) -> None:
    """Law: TensorBoard shows the numbers of the run's records."""
    given = small_settings(tmp_path, write_letters(tmp_path), level="O0", epochs=1)
    records = run(given | {"tensorboard": True}).folder.records()
    shown = read(tmp_path / "run" / "tensorboard")
    steps = [(r["step"], single(r["loss"])) for r in records if "event" not in r]
    assert shown["train/loss"] == steps
    assert [step for step, _ in shown["dev/loss"]] == [len(steps)]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without the library a run does not begin, and how to get it is told."""
    absent = {"tensorboard": None}
    monkeypatch.setattr(dependencies, "find_spec", lambda name: absent.get(name, name))
    settings = small_settings(tmp_path, write_letters(tmp_path), tensorboard=True)
    assert refused(run, settings) == (
        "--tensorboard needs tensorboard: install with pip install "
        "'halfstep[tensorboard]', or in a checkout pip install -e '.[tensorboard]'."
    )
    assert not (tmp_path / "run").exists()

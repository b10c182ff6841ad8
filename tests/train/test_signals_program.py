"""SIGTERM and SIGINT in the middle of an epoch: nothing done is lost."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_forked, run_ranks
from mini_train import REASON
from small_training import small_settings, write_letters

from halfstep.checkpoint import atomic_directory
from halfstep.train.output.run_directory import RunFolder

pytestmark = pytest.mark.usefixtures("small_runs")

PROGRAM = str(Path(__file__).parents[1] / "support" / "mini_train.py")
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
STEPS = 46  # 90 texts in batches of 4, twice
STRUCK = 3
"""Step in which the signal comes."""
LONGEST = 300.0  # seconds, on a machine that is busy


def settings(folder: Path, workers: int = 0) -> dict[str, Any]:
    more = {"level": "O2", "dtype": "bf16", "epochs": 2, "batch_size": 4}
    return small_settings(folder, write_letters(folder), workers=workers, **more)


def words(given: dict[str, Any]) -> list[str]:
    flags = [(f"--{name.replace('_', '-')}", str(given[name])) for name in given]
    return ["train", *(word for pair in flags for word in pair)]


@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
def test_the_step_is_finished_and_saved(tmp_path: Path, number: signal.Signals) -> None:
    """Law: the status tells the signal; one line tells how to go on; all is whole."""
    # One of them with a worker, which must not keep the program from ending.
    given = settings(tmp_path, workers=int(number is signal.SIGTERM))
    blow = ("--signal", f"{number.value}@{STRUCK}")
    (done,) = run_forked(PROGRAM, *blow, *words(given), timeout=LONGEST)
    folder = RunFolder(Path(given["out"]))
    assert done.returncode == STATUS[number]
    (step,) = folder.steps()
    assert folder.records()[-1]["step"] == step == STRUCK
    assert done.stderr == (
        f"halfstep: error: stopped by {number.name} after step {step} of {STEPS}; the "
        f"checkpoint is saved: go on with --resume --out {folder.path}\n"
    )
    path = folder.checkpoint_path(step)
    atomic_directory.verify(path, atomic_directory.read(path))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_process_that_cannot_react_ends(tmp_path: Path) -> None:
    """Law: SIGTERM ends processes that wait for each other, too; one line says so."""
    command = ("--block", f"1@{STRUCK}", *words(settings(tmp_path)))
    both = run_ranks(PROGRAM, *command, timeout=60, check=False)
    statuses = {process.returncode for process in both}
    # The first to end makes the other lose its peer.
    assert STATUS[signal.SIGTERM] in statuses <= {STATUS[signal.SIGTERM], 1}
    said = "".join(process.stderr for process in both)
    assert "halfstep: error: ended by SIGTERM: this process waits for" in said
    assert "Traceback" not in said


def test_an_error_ends_workers_too(tmp_path: Path) -> None:
    """Law: a step that fails ends the program, though workers heed no signal."""
    given = settings(tmp_path, workers=1)
    done = subprocess.run(
        [sys.executable, PROGRAM, "--fail", "0@3", *words(given)],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"RuntimeError: {REASON}")

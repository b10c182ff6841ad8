"""SIGTERM and SIGINT in the middle of an epoch: nothing done is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mini_train import REASON
from processes import ONE_THREAD
from small_training import (
    write_letters,
)

from halfstep.checkpoint import atomic_directory
from halfstep.train.output.run_directory import RunFolder

pytestmark = pytest.mark.usefixtures("small_runs")

PROGRAM = Path(__file__).parents[1] / "support" / "mini_train.py"
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
STEPS = 46  # 92 texts in batches of 4, twice
HELD = 3
"""Step that waits for the signal."""
LONGEST = 300.0  # seconds, on a machine that is busy


def settings(folder: Path, workers: int = 0) -> dict[str, Any]:
    return {
        "data": str(write_letters(folder)),
        "model": "mini",
        "level": "O2",
        "dtype": "bf16",
        "epochs": 2,
        "batch_size": 4,
        "out": str(folder / "run"),
        "workers": workers,
    }


def words(given: dict[str, Any]) -> list[str]:
    flags = [(f"--{name.replace('_', '-')}", str(given[name])) for name in given]
    return ["train", *(word for pair in flags for word in pair)]


def sent(given: dict[str, Any]) -> Path:
    return Path(given["out"]).with_name("sent")


Stopped = dict[signal.Signals, tuple[dict[str, Any], int, str]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Return of a run stopped by each signal its settings, status and last words.

    They run side by side: it is their starts that take long.
    """
    begun = {}
    for number in STATUS:
        # One of them with a worker, which must not keep the program from ending.
        workers = int(number is signal.SIGTERM)
        given = settings(tmp_path_factory.mktemp(number.name), workers)
        started = subprocess.Popen(
            [sys.executable, PROGRAM, "--hold", f"{HELD}@{sent(given)}", *words(given)],
            env=os.environ | ONE_THREAD,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun[number] = (given, started)
    try:
        for number, (given, started) in begun.items():
            metrics = Path(given["out"]) / "metrics.jsonl"
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < HELD - 1:
                assert started.poll() is None, started.stderr
                time.sleep(0.02)
            started.send_signal(number)
            sent(given).touch()
        found = {}
        for number, (given, started) in begun.items():
            _, said = started.communicate(timeout=LONGEST)
            found[number] = (given, started.returncode, said)
    finally:
        for _, started in begun.values():
            started.kill()
    return found


@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
def test_the_step_is_finished_and_saved(
    stopped: Stopped, number: signal.Signals
) -> None:
    """Law: the status tells the signal; one line tells how to go on; all is whole."""
    given, status, said = stopped[number]
    folder = RunFolder(Path(given["out"]))
    assert status == STATUS[number]
    (step,) = folder.steps()
    assert folder.records()[-1]["step"] == step == HELD
    assert said == (
        f"halfstep: error: stopped by {number.name} after step {step} of {STEPS}; the "
        f"checkpoint is saved: go on with --resume --out {folder.path}\n"
    )
    path = folder.checkpoint_path(step)
    atomic_directory.verify(path, atomic_directory.read(path))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_error_ends_workers_too(tmp_path: Path) -> None:
    """Law: a step that fails ends the program, though workers heed no signal."""
    given = settings(tmp_path, workers=1)
    done = subprocess.run(
        [sys.executable, PROGRAM, "--fail", "0@3", *words(given)],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"RuntimeError: {REASON}")

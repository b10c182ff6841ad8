"""A process of torchrun's that dies: the run goes on by itself, or says why not."""

from pathlib import Path

import pytest
from forks import run_ranks
from mini_train import REASON
from processes import torchrun
from small_training import assert_same_run, write_letters

from halfstep.train.output.run_directory import RunFolder

PROGRAM = str(Path(__file__).parents[1] / "support" / "mini_train.py")
STEPS, EVERY = 12, 2  # 92 texts in batches of 16, twice
LONGEST = 300.0  # seconds, on a machine that is busy


def words(folder: Path, out: str) -> list[str]:
    """Return the command that trains into `folder / out`; write its data.

    Processes draw masks of their own, so that without any two learn as one.
    """
    return [
        *("train", "--data", str(write_letters(folder)), "--model", "mini"),
        *("--level", "O0", "--dropout", "0", "--mask-tokens", "0", "--epochs", "2"),
        *("--batch-size", "16", "--eval-every", str(EVERY)),
        *("--out", str(folder / out)),
    ]


def test_killed_and_started_again(tmp_path: Path) -> None:
    """Law: what torchrun starts again goes on from the last checkpoint, to the bit."""
    again = ("--max-restarts", "2", PROGRAM, "--kill", "1@5")
    done = torchrun(*again, *words(tmp_path, "two"), timeout=LONGEST)
    assert f"{STEPS} steps of 16 texts on 2 processes, ddp\n" in done.stdout
    assert f"on 2 processes, ddp, from step {5 // EVERY * EVERY}\n" in done.stdout
    assert done.stdout.count("\nreport: ") == 1
    run_ranks(PROGRAM, *words(tmp_path, "straight"), timeout=LONGEST)
    assert_same_run(tmp_path / "two", tmp_path / "straight")


@pytest.mark.parametrize(
    ("rank", "step", "error", "last"),
    [
        (0, 0, "MemoryError", ""),  # reading data, which the first process does
        (1, 5, "RuntimeError", ""),
        (1, 1, "KeyboardInterrupt", "halfstep: error: interrupted; `train --resume` "),
    ],
)
def test_a_failure_is_told_by_the_other(
    tmp_path: Path, rank: int, step: int, error: str, last: str
) -> None:
    """Law: a process that fails ends the other with one line: which, and why.

    Without torchrun, which ends the other, too, as soon as it sees one fail.
    """
    fault = (PROGRAM, "--fail", f"{rank}@{step}", "--error", error)
    both = run_ranks(*fault, *words(tmp_path, "run"), timeout=LONGEST, check=False)
    failed, told = both[rank], both[1 - rank]
    assert (failed.returncode, told.returncode) == (130 if last else 1, 1)
    assert failed.stderr.splitlines()[-1].startswith(last or f"{error}: ")
    lines = [line for line in told.stderr.splitlines() if "halfstep: error" in line]
    why = f"halfstep: error: stopped, because another process did: process {rank}: "
    (line,) = lines
    assert line.startswith(f"{why}{error}: ")
    assert REASON in line
    kept = RunFolder(tmp_path / "run").steps()
    assert max(kept, default=0) == step // EVERY * EVERY

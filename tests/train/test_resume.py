"""Stopped, killed and resumed: the same run to the bit.

Started as a program, this file makes a run that is killed at a chosen moment.
"""

import importlib
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import run_forked
from small_training import (
    assert_same_run,
    interrupt_before,
    small_and_measured,
    small_settings,
    steps_of,
    without_figures,
    write_letters,
)
from torch import Tensor

from halfstep.train.loop import Trainer
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.run import run

KINDS = ("O0 auto", "O1 fp16", "O2 bf16")
STEPS, EVERY = 18, 4  # 180 texts in batches of 32, three times
OUTPUT = "train.output.run_directory"
SPOILT = 3  # the step that overflows in every run with a moving scale

MOMENTS = {
    "in a step": ("O1 fp16", "train.loop", "Trainer.train_step", 8),
    "in a line of metrics": ("O2 bf16", OUTPUT, "RunFolder.log", 11),
    "in a checkpoint": ("O2 bf16", "checkpoint.single", "torch.save", 2),
    "before the summary": ("O1 fp16", OUTPUT, "RunFolder.write", 3),
}
"""Kind of run, what is struck, and in which of its calls: before it; in a line of
metrics after it, with the end of its file not on disk."""
WAITS = {
    f"before wait {n}": ("O2 bf16", "checkpoint.atomic_directory", "os.fsync", n)
    for n in range(1, 41)
}
"""Likewise: before each time that a run waits for the disk, the summary its last."""


def small_and_spoilt(patch: pytest.MonkeyPatch) -> None:
    small_and_measured(patch)
    without_figures(patch)
    clean = Trainer.micro_batch_loss

    def loss(self: Trainer, part: dict[str, Tensor]) -> Tensor:
        moves = self.session.scaler.rule.backoff_factor < 1
        bad = moves and self.state.step + 1 == SPOILT
        return clean(self, part) * (math.inf if bad else 1.0)

    patch.setattr(Trainer, "micro_batch_loss", loss)


def settings(folder: Path, kind: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    source = write_letters(folder, 200, "abcx", "defx", "ghix", lengths=(2, 20))
    level, dtype = kind.split()
    more = {"level": level, "dtype": dtype, "epochs": 3, "eval_every": EVERY}
    more |= {"batch_size": 32, "lr": 3e-3, "out": str(folder / kind)}
    return small_settings(folder, source, **more)


@pytest.fixture(autouse=True, scope="module")
def _spoilt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_and_spoilt(patch)
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("straight")

    def path(kind: str) -> Path:
        if not (folder / kind).exists():
            run(settings(folder, kind))
        return folder / kind

    return path


def test_the_straight_run(straight: Callable[[str], Path]) -> None:
    """Law: what the others are compared with is a run that learns, and moves."""
    for kind in KINDS:
        steps = steps_of(RunFolder(straight(kind)).records())
        assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
        assert len({record["loss"] for record in steps}) == STEPS
        skipped = [SPOILT] if kind.endswith("fp16") else []
        assert [record["step"] for record in steps if record["skipped"]] == skipped
        assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize(
    ("kind", "stops"), [("O0 auto", (6, 18)), ("O1 fp16", (2, 5)), ("O2 bf16", (3, 6))]
)
def test_stopped_and_resumed(
    tmp_path: Path,
    straight: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    stops: tuple[int, ...],
) -> None:
    """Law: a run that is stopped and resumed ends as one that was not."""
    given = settings(tmp_path, kind)
    expected = straight(kind)
    interrupt_before(monkeypatch, *stops)
    for number in range(len(stops)):
        with pytest.raises(KeyboardInterrupt):
            run(given, resume=number > 0)
    run({"out": given["out"]}, resume=True)
    assert_same_run(Path(given["out"]), expected)


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, straight: Callable[[str], Path]
) -> None:
    """Law: where the newest checkpoint is damaged, the one before leads to the same.

    Resuming where nothing is left to do changes nothing but times.
    """
    expected = straight("O2 bf16")
    folder = RunFolder(shutil.copytree(expected, tmp_path / "run"))
    run({"out": str(folder.path)}, resume=True)
    assert_same_run(folder.path, expected)
    newest, before = folder.steps()[:2]
    assert (newest, before) == (STEPS, STEPS - STEPS % EVERY)
    weights = folder.checkpoint_path(newest) / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    run({"out": str(folder.path)}, resume=True)
    assert_same_run(folder.path, expected)


unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork, no kill -9")


@unix
@pytest.mark.parametrize(
    "moment",
    [*MOMENTS, *(pytest.param(each, marks=pytest.mark.slow) for each in WAITS)],
)
def test_killed_and_resumed(
    tmp_path: Path, straight: Callable[[str], Path], moment: str
) -> None:
    """Law: kill -9 at any moment loses time, and not a bit; half files are swept."""
    kind = (MOMENTS | WAITS)[moment][0]
    (done,) = run_forked(__file__, str(tmp_path), moment, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    place = tmp_path / kind
    assert not (place / "summary.json").exists()
    if moment in MOMENTS:
        parts = place.glob("checkpoints/.*.part-*")
        assert bool([*parts]) == (moment == "in a checkpoint")
    run(settings(tmp_path, kind), resume=(place / "config.json").exists())
    assert_same_run(place, straight(kind))
    assert not [*place.glob("checkpoints/.*")]


def strike(patch: pytest.MonkeyPatch, room: str, target: str, call: int) -> None:
    owner: Any = importlib.import_module(f"halfstep.{room}")
    holder, name = target.split(".")
    owner = getattr(owner, holder)
    function, calls = getattr(owner, name), []

    def struck(*given: Any, **words: Any) -> Any:
        calls.append(given)
        if len(calls) == call and name != "log":
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*given, **words)
        if len(calls) == call:
            file = given[0].metrics
            file.write_bytes(file.read_bytes()[:-9])
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    patch.setattr(owner, name, struck)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as own:
        small_and_spoilt(own)
        kind_of_run, *blow = (MOMENTS | WAITS)[sys.argv[2]]
        strike(own, *blow)
        run(settings(Path(sys.argv[1]), kind_of_run))

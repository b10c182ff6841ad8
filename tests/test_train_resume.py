"""Stopped, killed and resumed: the same run to the bit.

Started as a program, this file makes runs that are killed at chosen moments.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import ONE_THREAD
from small_training import letters, one_thread, same, small_and_measured

from halfstep import checkpoint
from halfstep.train import result
from halfstep.train.folder import RunFolder
from halfstep.train.loop import Trainer
from halfstep.train.run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

KINDS = ("O0 auto", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16")
KILLED = ("O2 bf16", "O1 fp16")
STEPS, EVERY = 18, 4  # 180 texts in batches of 32, three times
SPOILT = 3  # the step that overflows in every run with a moving scale
TIMES = {"examples_per_s", "train_seconds", "tokenise_seconds", "peak_memory_bytes"}

# What is struck, in which of its calls, and when: before it, or after it with the end
# of its file not on disk.
MOMENTS = {
    "before the first checkpoint": ("train.loop.Trainer._train_step", 3, "before"),
    "in a step": ("train.loop.Trainer._train_step", 8, "before"),
    "in a line of metrics": ("train.folder.RunFolder.log", 11, "torn"),
    "in writing weights": ("checkpoint._digest", 3, "torn"),
    "in writing the rest": ("checkpoint._digest", 4, "torn"),
    "before the rename": ("checkpoint._flush", 4, "before"),
    "before the pointers": ("checkpoint.point", 3, "before"),
    "between the pointers": ("checkpoint.point", 2, "before"),
    "in publishing": ("train.result.write_text", 1, "before"),
}


def small_and_spoilt(patch: pytest.MonkeyPatch) -> None:
    """Train a small size, draw no figures; let one step overflow."""
    small_and_measured(patch)
    # Figures take longer than all the training here.
    patch.setattr(result, "page", lambda *_: "<html></html>")
    clean = Trainer._loss

    def loss(self: Trainer, indices: list[int]) -> Tensor:
        moves = self.session.scaler.rule.backoff_factor < 1
        bad = moves and self.step_done + 1 == SPOILT
        return clean(self, indices) * (math.inf if bad else 1.0)

    patch.setattr(Trainer, "_loss", loss)


def settings(folder: Path, kind: str) -> dict[str, Any]:
    """Return the settings of a run, with dropout and hidden tokens; write its data."""
    rows = letters(200, "abcx", "defx", "ghix", lengths=(2, 20))
    folder.mkdir(exist_ok=True)
    source = folder / "letters.json"
    source.write_text(json.dumps(rows), encoding="utf-8")
    level, dtype = kind.split()
    return {
        "data": str(source),
        "dev_share": 0.1,
        "model": "mini",
        "level": level,
        "dtype": dtype,
        "lr": 3e-3,
        "epochs": 3,
        "eval_every": EVERY,
        "out": str(folder / kind),
    }


@pytest.fixture(autouse=True, scope="module")
def _patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_and_spoilt(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Sums depend on how many threads share them."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives the folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")

    def path(kind: str) -> Path:
        if not (folder / kind).exists():
            run(settings(folder, kind))
        return folder / kind

    return path


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without what time told."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records]


def assert_same_run(one: Path, other: Path) -> None:
    """Hold that two runs left the same model, metrics, summary and checkpoints."""
    for name in ("model/model.safetensors", "model/tokenizer.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    folders = RunFolder(one), RunFolder(other)
    metrics = [timeless(folder.records()) for folder in folders]
    assert metrics[0] == metrics[1]
    told = [json.loads((path / "summary.json").read_text()) for path in (one, other)]
    assert timeless(told[:1]) == timeless(told[1:])
    names = [
        sorted(p.name for p in (f.path / "checkpoints").iterdir()) for f in folders
    ]
    assert names[0] == names[1]
    for which in (RunFolder.last, RunFolder.best):
        states = [checkpoint.load(which(folder)) for folder in folders]
        assert same(states[0].weights, states[1].weights)
        assert same(states[0].state, states[1].state)
    assert sorted(p.name for p in one.iterdir()) == sorted(
        p.name for p in other.iterdir()
    )


def stop_before(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Interrupt before some optimizer steps, each once."""
    left = list(steps)
    step = Trainer._train_step

    def interrupted(self: Trainer, number: int, *rest: Any) -> dict[str, Any]:
        if left and number == left[0]:
            left.pop(0)
            raise KeyboardInterrupt
        return step(self, number, *rest)

    monkeypatch.setattr(Trainer, "_train_step", interrupted)


def test_the_straight_run(straight: Callable[[str], Path]) -> None:
    """Law: what the others are compared with is a run that learns, and moves."""
    for kind in KINDS:
        records = RunFolder(straight(kind)).records()
        steps = [record for record in records if "event" not in record]
        assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
        assert len({record["loss"] for record in steps}) == STEPS
        skipped = [SPOILT] if kind.endswith("fp16") else []
        assert [record["step"] for record in steps if record["skipped"]] == skipped
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [(2,), (7,), (3, 5, 6, 18)], ids=str)
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
    stop_before(monkeypatch, *stops)
    for number in range(len(stops)):
        with pytest.raises(KeyboardInterrupt):
            run(given, resume=number > 0)
    run({"out": given["out"]}, resume=True)
    assert_same_run(Path(given["out"]), expected)


def test_resuming_a_finished_run(
    tmp_path: Path, straight: Callable[[str], Path]
) -> None:
    """Law: resuming where nothing is left to do changes nothing but times."""
    expected = straight("O2 bf16")
    copy = shutil.copytree(expected, tmp_path / "run")
    run({"out": str(copy)}, resume=True)
    assert_same_run(copy, expected)


unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork, no kill -9")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run for each kind and moment, killed at that moment."""
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | ONE_THREAD,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


@unix
@pytest.mark.parametrize("kind", KILLED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed(
    killed: Path, straight: Callable[[str], Path], kind: str, moment: str
) -> None:
    """Law: kill -9 at any moment loses time, and not a bit."""
    place = killed / moment / kind
    assert not (place / "summary.json").exists()
    run({"out": str(place)}, resume=True)
    assert_same_run(place, straight(kind))


@unix
def test_killed_from_outside(tmp_path: Path, straight: Callable[[str], Path]) -> None:
    """Law: a kill from another process while a checkpoint is written loses nothing."""
    model = str(straight("O2 bf16") / "model")
    given = settings(tmp_path, "O2 bf16") | {"model": model, "eval_every": 1}
    run(given | {"out": str(tmp_path / "straight")})
    words = [f"--{k.replace('_', '-')}={v}" for k, v in given.items()]
    program = subprocess.Popen(
        [sys.executable, "-m", "halfstep", "train", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    place = Path(given["out"])
    pattern = f"checkpoints/.step-*{STEPS // 3}.part-*"
    while program.poll() is None and not any(place.glob(pattern)):
        time.sleep(0.0005)
    program.kill()
    assert program.wait() == -signal.SIGKILL
    run({"out": given["out"]}, resume=True)
    assert_same_run(place, tmp_path / "straight")


def strike(patch: pytest.MonkeyPatch, target: str, call: int, when: str) -> None:
    """Let a process kill itself at one call of a function."""
    parts = target.split(".")
    kept = 1 if parts[-2][0].islower() else 2
    owner: Any = importlib.import_module(".".join(["halfstep", *parts[:-kept]]))
    if kept == 2:
        owner = getattr(owner, parts[-2])
    function, calls = getattr(owner, parts[-1]), []

    def struck(*given: Any, **words: Any) -> Any:
        calls.append(given)
        if len(calls) == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*given, **words)
        if len(calls) == call:
            file = getattr(given[0], "metrics", given[0])
            file.write_bytes(file.read_bytes()[:-9])
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    patch.setattr(owner, parts[-1], struck)


def kill_at_each_moment(folder: Path) -> None:
    """Make a run for each kind and moment, in a process that is killed there."""
    # Imported once, not by every child.
    for name in ("transformers.models.bert.modeling_bert", "sklearn.metrics"):
        importlib.import_module(name)
    for moment, (target, call, when) in MOMENTS.items():
        for kind in KILLED:
            child = os.fork()
            if child == 0:
                try:
                    with pytest.MonkeyPatch.context() as patch:
                        small_and_spoilt(patch)
                        strike(patch, target, call, when)
                        run(settings(folder / moment, kind))
                finally:
                    os._exit(1)  # It was to be killed.
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), (moment, kind)
            assert os.WTERMSIG(status) == signal.SIGKILL, (moment, kind)


if __name__ == "__main__":
    kill_at_each_moment(Path(sys.argv[1]))

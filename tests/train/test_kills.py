"""kill -9 at random moments, again and again: the model ends the same to the bit.

Started as a program, this file trains in children that it kills.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mini_train
import pytest
from small_training import timeless, write_letters

from halfstep.train.output.run_directory import RunFolder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork, no kill -9")

MODEL = "model/model.safetensors"
STEPS = 24  # 92 texts in batches of 8, twice


@pytest.mark.slow  # test_resume.py kills at moments that are chosen
@pytest.mark.parametrize(("processes", "kills"), [(1, 50), (2, 20)])
def test_killed_at_random_moments(tmp_path: Path, processes: int, kills: int) -> None:
    """Law: kill -9 at any moment loses time, and not a bit."""
    done = subprocess.run(
        [sys.executable, __file__, tmp_path, str(processes), str(kills)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert len(told["in_part"]) == kills
    assert any(told["in_part"]), "none was killed while it wrote a checkpoint"
    straight = tmp_path / "straight"
    metrics = timeless(RunFolder(straight).records())
    assert [r["step"] for r in metrics if "loss" in r] == list(range(1, STEPS + 1))
    for name in told["runs"]:
        out = tmp_path / name
        assert (out / MODEL).read_bytes() == (straight / MODEL).read_bytes(), name
        assert timeless(RunFolder(out).records()) == metrics, name
        assert not parts(out), name


def parts(out: Path) -> list[str]:
    try:
        names = os.listdir(out / "checkpoints")  # noqa: PTH208 -- the quickest look
    except FileNotFoundError:
        return []
    return [name for name in names if ".part-" in name]


def start(folder: Path, out: Path, processes: int) -> list[int]:
    words = (
        *("--pause", "0.01", "train", "--data", str(folder / "letters.json")),
        *("--model", "mini", "--level", "O2", "--dtype", "bf16", "--epochs", "2"),
        *("--batch-size", "8", "--eval-every", "3", "--out", str(out)),
    )
    if (out / "config.json").exists():
        words = (*words, "--resume")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            _train(words, out, rank, processes, port)
        children.append(child)
    return children


def _train(
    words: tuple[str, ...], out: Path, rank: int, processes: int, port: int
) -> None:
    status = 1
    try:
        if processes > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
            os.environ.update({name: str(place[name]) for name in place})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with contextlib.ExitStack() as stack:
            said = (out.parent / f"said-{out.name}-{rank}").open("a")
            stack.enter_context(said)
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(said))
            status = mini_train.main(words)
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(children: list[int]) -> bool:
    """Say whether all came to the end; each did, or was killed.

    Raises:
        RuntimeError: If one failed.
    """
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    if not set(codes) <= {0, -signal.SIGKILL}:
        raise RuntimeError(f"processes ended with {codes}, not 0 or killed")
    return not any(codes)


def over(child: int) -> bool:
    wish = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child, wish) is not None


def at_a_time(seconds: float) -> Callable[[Path, int], None]:
    def wait(_: Path, first: int) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over(first):
            time.sleep(0.001)

    return wait


def at_a_part(out: Path, first: int) -> None:
    while not over(first):
        if parts(out):
            os.kill(first, signal.SIGSTOP)
            if parts(out):  # It cannot become whole any more.
                return
            os.kill(first, signal.SIGCONT)


def kill_again_and_again(folder: Path, processes: int, kills: int) -> None:
    # Imported once, not by every child.
    importlib.import_module("transformers.models.bert.modeling_bert")
    write_letters(folder)
    began = time.monotonic()
    if not ended(start(folder, folder / "straight", processes)):
        raise RuntimeError("the run that nobody kills was killed")
    span = time.monotonic() - began
    draw = random.Random(kills)  # noqa: S311 -- moments are no secret
    in_part: list[bool] = []
    runs = ["run-0"]
    while len(in_part) < kills:
        out = folder / runs[-1]
        wait = at_a_time(draw.uniform(0, span)) if draw.random() < 0.5 else at_a_part
        if not in_part:
            wait = at_a_part
        children = start(folder, out, processes)
        wait(out, children[0])
        seen = bool(parts(out))
        for child in children:
            os.kill(child, signal.SIGKILL)
        if ended(children):
            runs.append(f"run-{len(runs)}")
        else:
            in_part.append(seen)
    if not ended(start(folder, folder / runs[-1], processes)):
        raise RuntimeError("a run that nobody kills was killed")
    told = {"in_part": in_part, "runs": runs}
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Signals as a wish to stop: a first, a second, none."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import run_forked, run_ranks
from mini_train import REASON
from small_training import small_settings, write_letters

from halfstep.checkpoint import atomic_directory
from halfstep.train import signals
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.signals import Stopped, StopRequest, stop_on_signals

BOTH = (signal.SIGTERM, signal.SIGINT)

SECOND_WISH = """
import signal
from types import SimpleNamespace
from halfstep.train import signals
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
now = 5.0
signals.time = SimpleNamespace(monotonic=lambda: now)
with signals.stop_on_signals(signals.StopRequest()):
    signal.raise_signal(signal.SIGINT)
    now += 0.99
    signal.raise_signal(signal.SIGINT)
    now += 0.02  # a second after the first, not after the last
    signal.raise_signal(signal.SIGTERM)
    print("not reached")
"""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    shown = [5.0]
    clock = SimpleNamespace(monotonic=lambda: shown[0])
    monkeypatch.setattr(signals, "time", clock)
    before = {number: signal.getsignal(number) for number in BOTH}
    for number in BOTH:
        signal.signal(number, signal.default_int_handler)
    yield shown
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_a_wish(now: list[float]) -> None:
    """Law: a signal is remembered, and the program goes on to its end.

    What comes within a second, whichever signal, is the same wish.
    """
    for first, second in (BOTH, BOTH[::-1]):
        stop = StopRequest()
        with stop_on_signals(stop):
            assert stop.signal == 0
            signal.raise_signal(first)
            signal.raise_signal(first)
            now[0] += 0.99
            signal.raise_signal(second)
            assert stop.signal == first


def test_a_second_wish_ends_the_program() -> None:
    """Law: a signal after that second ends the program as the system does."""
    ended = subprocess.run(
        [sys.executable, "-c", SECOND_WISH],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr


@pytest.mark.usefixtures("now")
def test_ignored_stays_ignored() -> None:
    """Law: what is ignored, as in a shell's background, is no wish and stays so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = StopRequest()
    with stop_on_signals(stop):
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == 0
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("now")
def test_handlers_come_back() -> None:
    """Law: after the context signals do what they did, even if it failed."""
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    stop = StopRequest()
    with pytest.raises(KeyError), stop_on_signals(stop):
        raise KeyError
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert stop.signal == 0


def test_in_another_thread() -> None:
    """Law: where signals cannot be taken, the context runs and changes nothing."""
    before = [signal.getsignal(n) for n in BOTH]
    inside: list[object] = []

    def work() -> None:
        with stop_on_signals(StopRequest()):
            inside.extend(signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == before


@pytest.mark.parametrize(
    ("number", "name", "status"),
    [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 143)],
)
def test_what_is_said(number: signal.Signals, name: str, status: int) -> None:
    """Law: the status is the shell's for the signal; the message says how to go on."""
    stopped = Stopped(int(number), 3, 9, "my runs/a")
    assert stopped.status == status
    assert str(stopped) == (
        f"stopped by {name} after step 3 of 9; the checkpoint is saved: go on with "
        "--resume --out 'my runs/a'"
    )


# In the middle of an epoch: nothing done is lost

PROGRAM = str(Path(__file__).parents[1] / "support" / "mini_train.py")
STEPS = 46  # 90 texts in batches of 4, twice
TERMINATED = 143
STRUCK = 3
"""Step in which the signal comes."""
LONGEST = 300.0  # seconds, on a machine that is busy


def settings(folder: Path, workers: int = 0) -> dict[str, Any]:
    more = {"level": "O2", "dtype": "bf16", "epochs": 2, "batch_size": 4}
    return small_settings(folder, write_letters(folder), workers=workers, **more)


def words(given: dict[str, Any]) -> list[str]:
    flags = [(f"--{name.replace('_', '-')}", str(given[name])) for name in given]
    return ["train", *(word for pair in flags for word in pair)]


def test_the_step_is_finished_and_saved(tmp_path: Path) -> None:
    """Law: the status tells the signal; one line tells how to go on; all is whole.

    A worker must not keep the program from ending.
    """
    given = settings(tmp_path, workers=1)
    blow = ("--signal", f"{signal.SIGTERM.value}@{STRUCK}")
    (done,) = run_forked(PROGRAM, *blow, *words(given), timeout=LONGEST)
    folder = RunFolder(Path(given["out"]))
    assert done.returncode == TERMINATED
    (step,) = folder.steps()
    assert folder.records()[-1]["step"] == step == STRUCK
    assert done.stderr == (
        f"halfstep: error: stopped by SIGTERM after step {step} of {STEPS}; the "
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
    assert TERMINATED in statuses <= {TERMINATED, 1}
    said = "".join(process.stderr for process in both)
    assert "halfstep: error: ended by SIGTERM: this process waits for" in said
    assert "Traceback" not in said


def test_an_error_ends_workers_too(tmp_path: Path) -> None:
    """Law: a step that fails ends the program, though workers heed no signal."""
    given = settings(tmp_path, workers=1)
    fail = ("--fail", f"0@{STRUCK}")
    (done,) = run_forked(PROGRAM, *fail, *words(given), timeout=LONGEST)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"RuntimeError: {REASON}")

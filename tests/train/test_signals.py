"""Signals as a wish to stop, in programs of their own: a first, a second, none."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from halfstep.train.signals import Stopped, StopRequest, stop_on_signals

START = """
import os, signal
from types import SimpleNamespace
from halfstep.train import signals as stopping
from halfstep.train.signals import StopRequest, stop_on_signals

now = 5.0
stopping.time = SimpleNamespace(monotonic=lambda: now)

def send(number):
    os.kill(os.getpid(), number)

stop = StopRequest()
"""


def run(body: str, *, ignoring: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program; return how it ended and what it wrote."""
    # A shell's background has it ignored, and so has what is started there.
    heed = "SIG_IGN" if ignoring else "default_int_handler"
    first = f"import signal; signal.signal({signal.SIGINT:d}, signal.{heed})\n"
    return subprocess.run(
        [sys.executable, "-c", first + START + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish(number: signal.Signals) -> None:
    """Law: a signal is remembered, and the program goes on to its end."""
    ended = run(f"""
with stop_on_signals(stop):
    assert stop.signal == 0
    send({number:d})
    print("on", stop.signal)
""")
    assert (ended.returncode, ended.stdout) == (0, f"on {number:d}\n"), ended.stderr


def test_twice_within_a_second() -> None:
    """Law: what comes within a second, whichever signal, is the same wish."""
    ended = run("""
with stop_on_signals(stop):
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    now += 0.99
    send(signal.SIGINT)
    print("on", stop.signal)
""")
    wanted = (0, f"on {signal.SIGTERM:d}\n")
    assert (ended.returncode, ended.stdout) == wanted, ended.stderr


def test_a_second_wish_ends_the_program() -> None:
    """Law: a signal after that second ends the program as the system does."""
    ended = run("""
with stop_on_signals(stop):
    send(signal.SIGINT)
    now += 0.99
    send(signal.SIGINT)
    now += 0.02  # a second after the first, not after the last
    send(signal.SIGTERM)
    print("not reached")
""")
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr


def test_ignored_stays_ignored() -> None:
    """Law: what is ignored, as in a shell's background, is no wish and stays so."""
    ended = run(
        """
with stop_on_signals(stop):
    send(signal.SIGINT)
    print("wish", stop.signal)
    send(signal.SIGTERM)
    print("wish", stop.signal)
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
""",
        ignoring=True,
    )
    told = f"wish 0\nwish {signal.SIGTERM:d}\n"
    assert (ended.returncode, ended.stdout) == (0, told), ended.stderr


def test_handlers_come_back() -> None:
    """Law: after the region signals do what they did, even if it failed."""
    ended = run("""
def own(number, frame):
    print("own", number)
signal.signal(signal.SIGTERM, own)
try:
    with stop_on_signals(stop):
        raise KeyError
except KeyError:
    send(signal.SIGTERM)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert stop.signal == 0
""")
    wanted = (0, f"own {signal.SIGTERM:d}\n")
    assert (ended.returncode, ended.stdout) == wanted, ended.stderr


def test_in_another_thread() -> None:
    """Law: where signals cannot be taken, the region runs and changes nothing."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
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
    stopped = Stopped(int(number), 3, 9, "runs/a")
    assert stopped.status == status
    assert str(stopped) == (
        f"stopped by {name} after step 3 of 9; the checkpoint is saved: go on with "
        "--resume --out runs/a"
    )

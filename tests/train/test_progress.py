"""What a person sees of a run: plain lines on a pipe, a live line on a terminal."""

import io
import re
import sys
from typing import Any

import pytest

from halfstep.train.output.progress import progress

NUMBERS = r"loss 1\.2346  lr 5\.00e-04  skipped 2  1234 examples/s"


class Terminal(io.StringIO):
    """A standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def record(step: int, **more: Any) -> dict[str, Any]:
    base = {"loss": 1.23456, "lr": 5e-4, "scale": 1.0, "skipped_total": 2}
    return {"step": step, **base, "examples_per_s": 1234.4, **more}


def show(total: int, done: int = 0, *, leads: bool = True) -> None:
    shown = progress(total, done, leads=leads)
    shown.print_line("[bold]begins\x1b[m")
    for step in range(done + 1, total + 1):
        shown.step(record(step))
    shown.close()


@pytest.mark.parametrize("total", [1, 7, 20, 39, 400])
def test_plain_lines(total: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a pipe gets some twenty whole lines however long the run, the last step too.

    Twenty are asked for, and rounding down what lies between them gives under forty.
    """
    show(total)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == r"[bold]begins\x1b[m"
    assert min(total, 20) <= len(lines) < 40
    for line in lines:
        assert re.fullmatch(rf"step \d+/{total}  {NUMBERS}  \d+ s left", line), line
    assert lines[-1].startswith(f"step {total}/{total} ")
    assert lines[-1].endswith("  0 s left")


def test_lines_after_resuming(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the time left is reckoned from the steps of this process alone."""
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    shown = progress(20, 10, leads=True)
    shown.step(record(15))
    # 5 steps took 10 seconds, 5 are left.
    assert capsys.readouterr().out.endswith("  10 s left\n")


@pytest.mark.parametrize(("scale", "words"), [(1.0, ""), (65536.0, "scale 65536  ")])
def test_the_scale(
    scale: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a loss scale is shown where there is one."""
    progress(1, 0, leads=True).step(record(1, scale=scale))
    assert f"lr 5.00e-04  {words}skipped" in capsys.readouterr().out


def test_followers_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: of many processes only the first speaks."""
    show(3, leads=False)
    assert capsys.readouterr() == ("", "")


def test_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a terminal gets one line that changes, and says what stays as it is.

    A resumed run shows from the start how far it is.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", Terminal())
    show(30)
    written = sys.stdout.getvalue()
    assert "[bold]begins\\x1b[m\n" in written
    assert re.search(rf"30/30 .*{NUMBERS}", written)
    assert written.count("\n") < 5
    monkeypatch.setattr(sys, "stdout", Terminal())
    progress(30, 12, leads=True).close()
    assert "12/30" in sys.stdout.getvalue()

"""What a person sees of a run: plain lines on a pipe, a live line on a terminal."""

import io
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from small_training import (
    small_and_measured,
    small_settings,
    without_figures,
    write_letters,
)

from halfstep.train.output.progress import progress
from halfstep.train.run import run
from halfstep.train.task_progress import announce, track

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


# Of a long task: nothing, a bar, or a line now and then

PARTS = ["abc", "de", "f", "ghij"]


def slow_clock(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let some seconds pass between any two looks at the clock."""
    clock = itertools.count(0.0, seconds)
    patch.setattr("time.perf_counter", lambda: next(clock))


def shown(patch: pytest.MonkeyPatch, seconds: float, *, terminal: bool = False) -> str:
    """Return what is shown of a task whose parts take some seconds each."""
    slow_clock(patch, seconds)
    patch.setattr("tqdm.std.time", lambda: clock)
    clock = 0.0
    stream = io.StringIO()
    patch.setattr(stream, "isatty", lambda: terminal)
    patch.setattr(sys, "stderr", stream)
    for part in track(iter(PARTS), "reading", "letters", 10):
        assert part in PARTS
        clock += seconds
    return stream.getvalue()


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a pipe gets a line after two seconds, and then every ten."""
    assert shown(monkeypatch, 0.4) == ""
    assert shown(monkeypatch, 5).splitlines() == [
        "reading: 3 of 10 letters, 0.6/s  12 s left",
        "reading: 6 of 10 letters, 0.4/s  10 s left",
    ]


def test_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a terminal gets a bar after two seconds, which leaves nothing behind."""
    assert "reading" not in shown(monkeypatch, 0.01, terminal=True)
    bar = shown(monkeypatch, 5, terminal=True)
    assert "6/10" in bar
    assert not bar.rstrip("\r").rpartition("\r")[2].strip()


def test_one_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of many processes only the first speaks."""
    monkeypatch.setattr("halfstep.distributed.process_group.rank", lambda: 1)
    assert shown(monkeypatch, 60) == ""


def test_every_task_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a run shows reading, tokenizing and evaluating; the next run, evaluating."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)
    slow_clock(monkeypatch, 5)
    settings = small_settings(tmp_path, write_letters(tmp_path), max_steps=1)

    def tasks() -> set[str]:
        run(settings, overwrite=True)
        lines = capsys.readouterr().err.splitlines()
        return {line.partition(":")[0] for line in lines}

    data = settings["data"]
    every_time = {"collecting characters", "evaluating"}
    every_time |= {"counting n-grams", "weighting n-grams"}
    assert tasks() == {f"reading {data}", "tokenizing", *every_time}
    assert tasks() == every_time


def test_a_task_of_many_texts_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: what cannot tell how far it is says that it begins, if it takes long."""
    announce("fitting", 10)
    announce("fitting", 20_000)
    assert capsys.readouterr() == ("", "fitting to 20,000 texts ...\n")

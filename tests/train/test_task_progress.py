"""What a person sees of a long task: nothing, a bar, or a line now and then."""

import io
import itertools
import sys
from pathlib import Path

import pytest
from small_training import (
    small_and_measured,
    small_settings,
    without_figures,
    write_letters,
)

from halfstep.train.run import run
from halfstep.train.task_progress import track

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
        "reading: 3 of 10 letters  12 s left",
        "reading: 6 of 10 letters  10 s left",
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
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)
    slow_clock(monkeypatch, 5)
    settings = small_settings(tmp_path, write_letters(tmp_path), max_steps=1)

    def tasks() -> set[str]:
        run(settings, overwrite=True)
        lines = capsys.readouterr().err.splitlines()
        return {line.partition(":")[0] for line in lines}

    every_time = {"collecting characters", "evaluating"}
    assert tasks() == {"reading letters.json", "tokenizing", *every_time}
    assert tasks() == every_time

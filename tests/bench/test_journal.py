"""The journal of a bench: no measurement is lost."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from halfstep.bench import journal
from halfstep.errors import UserError

TAKEN = (1.0, 2.0, 3.0, 4.0)


def lines(place: Path) -> list[Any]:
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]


def test_each_measurement_is_on_disk_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a line of JSON is there as soon as it is recorded, and none at the end."""
    file, part = tmp_path / "found.json", tmp_path / "found.json.part"
    journal.record("before", seconds=1.0)
    with journal.open_journal(file):
        journal.record("a", seconds=1.5, bad=math.nan, where={"deep": [1]})
        first = {"name": "a", "seconds": 1.5, "bad": "nan", "where": {"deep": [1]}}
        assert lines(part) == [first]
        journal.record("b", seconds=2.0)
        assert lines(part)[1:] == [{"name": "b", "seconds": 2.0}]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_an_interrupted_bench_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: figures so far are printed, and their lines stay; the error goes on."""

    def run() -> None:
        with journal.open_journal(tmp_path / "found.json"):
            for seconds in (1.0, 5.0, 3.0):
                journal.record("a", seconds=seconds, level="O1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(lines(tmp_path / "found.json.part")) == 3
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "Measured so far"
    assert err[3].split() == ["a", "seconds", "3", "3.000000"]
    assert err[-1] == f"each measurement: {tmp_path / 'found.json.part'}"
    with journal.open_journal(None):
        pass  # none is left open


def test_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: without --json, or on standard output, the figures are printed all the same.

    Where nothing was measured, nothing is.
    """

    def fail(file: Path | None, **figures: int) -> str:
        with contextlib.suppress(OSError), journal.open_journal(file):
            journal.record("a", **figures)
            raise OSError
        return capsys.readouterr().err

    for file in (None, Path("-"), Path("/dev/null")):
        assert "a     steps       1  7.000000" in fail(file, steps=7)
    assert fail(None) == ""
    assert not list(Path.cwd().glob("*.part"))


def test_bad_file_is_rejected_before_it_measures(tmp_path: Path) -> None:
    """Law: a --json that cannot be written is no surprise after hours."""
    file = tmp_path / "nowhere" / "found.json"
    with pytest.raises(UserError) as caught, journal.open_journal(file):
        pytest.fail("it ran")
    assert str(caught.value) == (
        f"--json {file} cannot be written: No such file or directory."
    )

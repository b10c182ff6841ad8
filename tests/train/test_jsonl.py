"""Metrics of a run: lines that come back, of which a crash can cut only the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from halfstep.errors import UserError
from halfstep.train.output.run_directory import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a folder in which a run has begun."""
    found = RunFolder(tmp_path / "run")
    found.begin({"seed": 1}, overwrite=False)
    return found


def test_metrics_round_trip(folder: RunFolder) -> None:
    """Law: records come back to the last bit; JSON has no inf and no NaN, but null."""
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 0.1 + 0.2, "names": ["a.b", "\u2028"]},
        {"step": 2, "loss": float("inf"), "grad_norm": None},
    ]
    for record in records:
        folder.log(record)
    records[1]["loss"] = None
    assert folder.records() == records
    folder.log({"step": 3, "loss": [float("nan"), {"a": -float("inf")}]})
    assert folder.records()[2] == {"step": 3, "loss": [None, {"a": None}]}
    before = folder.metrics.read_bytes()
    folder.rewind(3)
    assert folder.metrics.read_bytes() == before


@pytest.mark.parametrize("torn", ['{"st', '{"step": 3, "loss": 1.5', "\0\0\0\0", "{"])
def test_a_torn_line(folder: RunFolder, torn: str) -> None:
    """Law: a line that a crash cut is left out, and resuming removes it."""
    for step in (1, 2):
        folder.log({"step": step})
    with folder.metrics.open("a") as file:
        file.write(torn)
    assert folder.records() == [{"step": 1}, {"step": 2}]
    folder.rewind(2)
    folder.log({"step": 3})
    assert folder.records() == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"3", b'{"loss": 1}', b'{"step": "1"}', b"\xff\xfe"]
)
def test_a_damaged_line(folder: RunFolder, line: bytes) -> None:
    """Law: a line that is whole and no record is named by its number."""
    folder.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    before = folder.metrics.read_bytes()
    for use in (folder.records, lambda: folder.rewind(1)):
        with pytest.raises(UserError) as caught:
            use()
        assert str(caught.value) == (
            f"{folder.metrics} line 2 is damaged: it is not a record of a step. "
            "Remove the line, or start anew with another --out."
        )
    assert folder.metrics.read_bytes() == before


def test_rewind(folder: RunFolder) -> None:
    """Law: what comes after the checkpoint's step is dropped, evaluations too."""
    for step in (1, 2, 3, 4):
        folder.log({"step": step})
        if step % 2 == 0:
            folder.log({"step": step, "event": "eval"})
    folder.rewind(2)
    kept = [{"step": 1}, {"step": 2}, {"step": 2, "event": "eval"}]
    assert folder.records() == kept
    folder.rewind(0)
    assert folder.records() == []
    assert folder.metrics.exists()


def test_rewind_before_the_first_line(folder: RunFolder) -> None:
    """Law: a run that was stopped before its first step rewinds to nothing."""
    folder.rewind(0)
    assert folder.metrics.read_bytes() == b""

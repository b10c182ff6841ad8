"""Predictions in files: columns as they stand, a whole file or none; tables."""

import csv
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from data_files import refused

from halfstep.errors import UserError
from halfstep.train import prediction_files
from halfstep.train.data.source import TextRow
from halfstep.train.prediction_files import table, target, write

CHUNK = 2
SUNNY = {"label": "sun", "p(rain)": 0.25, "p(sun)": 0.75}
ADA = {"start": 0, "end": 3, "label": "PER", "text": "Ada"}


class Oracle:
    """Predicts the same for each text; those that end with ... are cut."""

    precision = "fp32 on cpu"

    def __init__(self, *predictions: dict[str, Any]) -> None:
        self.predictions = itertools.cycle(predictions)

    def predict_rows(
        self, rows: Iterable[TextRow], advance: Callable[[int], object] = id
    ) -> Iterator[tuple[Sequence[TextRow], list[dict[str, Any]], list[int]]]:
        source = iter(rows)
        while part := list(itertools.islice(source, CHUNK)):
            advance(len(part))
            cut = [i for i, row in enumerate(part) if row.text.endswith("...")]
            yield part, list(itertools.islice(self.predictions, len(part))), cut


def rows_of(*columns: dict[str, Any]) -> list[TextRow]:
    return [
        TextRow(each.get("text", "x"), None, each, f"posts.csv line {number}")
        for number, each in enumerate(columns, 2)
    ]


ROWS = rows_of(
    {"id": "007", "text": 'say "天", \n twice', "n": 1},
    {"id": " 8", "text": "b...", "n": None},
    {"id": "", "text": "c", "n": 3},
)
PREDICTED = [row.columns | SUNNY for row in ROWS]


def cells(path: Path, delimiter: str) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_columns_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: all formats hold the rows in order: their columns as they stand, then ours.

    Standard error has the number of rows, the precision and what was cut.
    """
    for suffix in prediction_files.WRITERS:
        path = tmp_path / f"out{suffix}"
        write(Oracle(SUNNY), ROWS, path, suffix)
        out, err = capsys.readouterr()
        assert out == ""
        *_, summary, cut = err.splitlines()  # after progress, if it is slow
        assert summary.startswith("3 rows, ")
        assert summary.endswith(", fp32 on cpu")
        assert "1 text was cut" in cut
        assert "posts.csv line 3" in cut
        if suffix in {".csv", ".tsv"}:
            rows: list[Any] = cells(path, {".csv": ",", ".tsv": "\t"}[suffix])
            words = [
                {k: "" if v is None else v for k, v in r.items()} for r in PREDICTED
            ]
            assert rows == [{k: str(v) for k, v in row.items()} for row in words]
        else:
            rows = json_rows(path)
            assert rows == PREDICTED
            assert "天" in path.read_text("utf-8")
        assert [list(row) for row in rows] == [list(row) for row in PREDICTED]


def test_a_column_is_never_replaced(tmp_path: Path) -> None:
    """Law: a prediction whose name a column has is called predicted_ and that name."""
    path = tmp_path / "out.jsonl"
    write(Oracle(SUNNY), ROWS, path, ".jsonl")
    for times in (1, 2):
        write(Oracle(SUNNY), rows_of(*json_rows(path)), path, ".jsonl")
        names = ["predicted_" * n + name for n in range(times + 1) for name in SUNNY]
        assert all(list(row) == [*ROWS[0].columns, *names] for row in json_rows(path))


@pytest.mark.parametrize(
    "prediction", [{"entities": [ADA]}, {"entities": []}, {"labels": ["a", "b"]}]
)
def test_lists(tmp_path: Path, prediction: dict[str, Any]) -> None:
    """Law: lists are JSON in a cell, and so are lists, objects and booleans of rows."""
    own = {"tags": ["x"], "ok": True, "of": {"a": 1}}
    write(Oracle(prediction), rows_of(own), tmp_path / "out.csv", ".csv")
    (row,) = cells(tmp_path / "out.csv", ",")
    assert {key: json.loads(cell) for key, cell in row.items()} == own | prediction


def test_rows_that_differ(tmp_path: Path) -> None:
    """Law: a row may lack a column of the first ones; a further one is named."""
    path = tmp_path / "out.csv"
    write(Oracle(SUNNY), rows_of({"a": 1}, {"b": 2}, {"a": 3}), path, ".csv")
    assert [(row["a"], row["b"]) for row in cells(path, ",")] == [
        *(("1", ""), ("", "2"), ("3", ""))
    ]
    late = rows_of({"a": 1}, {"a": 1}, {"a": 1, "c": 2})
    message = refused(write, Oracle(SUNNY), late, path, ".csv")
    assert message.startswith("posts.csv line 4 has 'c'")


def failing() -> Iterator[TextRow]:
    yield from ROWS[:CHUNK]
    raise UserError("posts.csv line 9: text is blank.")


@pytest.mark.parametrize("before", [None, "what was there\n"])
def test_whole_or_not_at_all(tmp_path: Path, before: str | None) -> None:
    """Law: a failure on the way leaves the file as it was, and nothing beside it."""
    path = tmp_path / "out"
    if before is not None:
        path.write_text(before, encoding="utf-8")
    for rows, named in ((failing(), "line 9"), ([], "no text")):
        assert named in refused(write, Oracle(SUNNY), rows, path, ".csv")
        left = [each.read_text("utf-8") for each in tmp_path.iterdir()]
        assert left == ([] if before is None else [before])
    write(Oracle(SUNNY), ROWS, path, ".jsonl")
    assert json_rows(path) == PREDICTED


def test_the_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    """Law: until the last row is written, the file is the one that was there."""
    path = tmp_path / "out.csv"
    path.write_text("what was there")

    def rows() -> Iterator[TextRow]:
        for row in ROWS:
            assert path.read_text() == "what was there"
            yield row
        assert path.read_text() == "what was there"

    write(Oracle(SUNNY), rows(), path, ".csv")
    assert len(cells(path, ",")) == len(ROWS)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes by name")
def test_links_and_pipes(tmp_path: Path) -> None:
    """Law: a link stays one and its file is replaced; a pipe is written directly."""
    real, link, pipe = (tmp_path / name for name in ("real", "link", "pipe"))
    real.touch()
    link.symlink_to(real)
    write(Oracle(SUNNY), ROWS, link, ".jsonl")
    assert link.is_symlink()
    assert json_rows(real) == PREDICTED
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")))
    reader.start()
    write(Oracle(SUNNY), ROWS, pipe, ".jsonl")
    reader.join()
    assert [json.loads(line) for line in read[0].splitlines()] == PREDICTED
    assert pipe.is_fifo()


def test_cannot_be_written(tmp_path: Path) -> None:
    """Law: a place that cannot be written is rejected with the system's reason."""
    for path, why in (
        (tmp_path / "none" / "out.jsonl", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        message = refused(write, Oracle(SUNNY), ROWS, path, ".jsonl")
        assert message == f"{path} cannot be written: {why}."


def test_target(tmp_path: Path) -> None:
    """Law: --out has a known suffix, is not --data, and goes without --json."""
    out, data = tmp_path / "Out.CSV", tmp_path / "posts.csv"
    data.touch()
    assert target(out, None, str(data)) == (out, ".csv")
    assert target(None, None, None) is None
    assert target(None, Path("-"), None) == (None, ".jsonl")
    assert target(None, Path("x.csv"), None) == (Path("x.csv"), ".jsonl")
    out.symlink_to(data)
    for words in (
        (out, None, str(data)),
        (tmp_path / "out.xls", None, None),
        (data, Path("-"), None),
    ):
        assert str(words[0]) in refused(target, *words)


def test_table() -> None:
    """Law: a terminal shows the first rows, entities as words, and what is cut."""
    shown = table(Oracle(SUNNY), ROWS[:CHUNK])
    assert shown.columns == (*SUNNY, "text")
    assert shown.rows == tuple((*SUNNY.values(), row.text) for row in ROWS[:CHUNK])
    assert "posts.csv line 3" in "".join(shown.notes)
    found = table(Oracle({"entities": [ADA, ADA]}, {"entities": []}), ROWS[:CHUNK])
    assert [row[0] for row in found.rows] == ["Ada (PER), Ada (PER)", None]
    assert table(Oracle({"value": 2.5e-7}), ROWS[:1]).rows[0][0] == "2.5e-07"
    refused(table, Oracle(SUNNY), [])


def test_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of a long file a terminal shows some rows, and reads one more."""
    monkeypatch.setattr(prediction_files, "PREVIEW", CHUNK)
    read = iter(ROWS * 9)
    shown = table(Oracle(SUNNY), read)
    assert len(shown.rows) == CHUNK
    assert "--out FILE" in shown.notes[-1]
    assert len(list(read)) == len(ROWS) * 9 - CHUNK - 1

"""Predictions on their way out: tables to read, and a file whole or not at all."""

import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_files import refused

from halfstep.errors import UserError
from halfstep.train.predict import (
    Entities,
    Entity,
    Label,
    drop_blank,
    lines,
    tables,
    write,
)

SUNNY = Label("abc", "sun", {"rain": 0.25, "sun": 0.75}, cut=False)
RAINY = Label("天" * 9, "rain", {"rain": 0.5, "sun": 0.5}, cut=True)
ADA = Entity("PER", 0, 3, "Ada")
PARIS = Entity("LOC", 7, 12, "Paris")
BOTH = Entities("Ada in Paris", (ADA, PARIS), cut=False)
NONE = Entities("so it is", (), cut=False)
OUTPUTS = ("rain", "sun")
CUT = "cut at --max-length of the run; what follows was not read."


def failing() -> Iterator[Label]:
    yield SUNNY
    raise UserError("text 2 is blank.")


def test_table_of_labels() -> None:
    """Law: a row a text, the probabilities in the order of the outputs."""
    (table,) = tables([SUNNY, RAINY], OUTPUTS, [1, 2])
    assert table.columns == ("label", "p(rain)", "p(sun)", "text")
    assert table.rows == (
        ("sun", 0.25, 0.75, SUNNY.text),
        ("rain", 0.5, 0.5, RAINY.text),
    )
    assert table.notes == (f"1 text was {CUT}",)
    assert tables([SUNNY], OUTPUTS, [1])[0].notes == ()
    odd = Label("abc", "label", {"text": 0.25, "label": 0.75}, cut=False)
    (table,) = tables([odd], ("text", "label"), [1])
    assert table.rows == (("label", 0.25, 0.75, "abc"),)


def test_table_of_entities() -> None:
    """Law: a row an entity with the number of its text; a text without one has one."""
    numbered, notes = drop_blank([BOTH.text, " ", NONE.text])
    assert notes == ("text 2 is blank, and left out.",)
    (table,) = tables([BOTH, NONE], ("O",), [number for number, _ in numbered])
    assert table.columns == ("text", "type", "entity", "start", "end")
    assert table.rows == (
        (1, "PER", "Ada", 0, 3),
        (1, "LOC", "Paris", 7, 12),
        (3, "-", "no entity", None, None),
    )
    assert len(table.notes) == 1


def test_nothing_but_blanks() -> None:
    with pytest.raises(UserError, match=r"^text 1, 2 is blank; give at least one"):
        drop_blank([" ", ""])


def test_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: one JSON object a text, in UTF-8; what was cut is told beside it."""
    path = tmp_path / "out.jsonl"
    write([SUNNY, RAINY, RAINY], path)
    told = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert told == [
        {"text": o.text, "label": o.label, "probabilities": o.probabilities}
        | {"cut": o.cut}
        for o in (SUNNY, RAINY, RAINY)
    ]
    assert "天" in path.read_text("utf-8")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("3 texts, ")
    assert f"2 texts were {CUT}" in err


@pytest.mark.parametrize("before", [None, "what was there\n"])
def test_whole_or_not_at_all(tmp_path: Path, before: str | None) -> None:
    """Law: a failure on the way leaves the file as it was, and nothing beside it."""
    path = tmp_path / "out.jsonl"
    if before is not None:
        path.write_text(before, encoding="utf-8")
    with pytest.raises(UserError, match=r"^text 2 is blank\.$"):
        write(failing(), path)
    left = [each.read_text("utf-8") for each in tmp_path.iterdir()]
    assert left == ([] if before is None else [before])
    write([SUNNY], path)
    assert json.loads(path.read_text("utf-8"))["label"] == "sun"


def test_through_a_link(tmp_path: Path) -> None:
    """Law: a link stays one; the file that it leads to is replaced."""
    real, link = tmp_path / "real.jsonl", tmp_path / "there" / "out.jsonl"
    real.touch()
    link.parent.mkdir()
    link.symlink_to(real)
    write([SUNNY], link)
    assert link.is_symlink()
    assert json.loads(real.read_text("utf-8"))["label"] == "sun"


def test_into_a_pipe(tmp_path: Path) -> None:
    """Law: what is no plain file is written directly, and stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")))
    reader.start()
    write([SUNNY], pipe)
    reader.join()
    assert json.loads(read[0])["label"] == "sun"
    assert pipe.is_fifo()


def test_cannot_be_written(tmp_path: Path) -> None:
    """Law: a place that cannot be written is refused with the system's reason."""
    for path, why in (
        (tmp_path / "none" / "out.jsonl", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        assert (
            refused(write, [SUNNY], path) == f"--json {path} cannot be written: {why}."
        )


def test_lines() -> None:
    """Law: a text a line, blank ones and the mark of UTF-8 left out."""
    source = io.BytesIO("\ufeffab c\r\n\n  \n 天 \nlast".encode())
    assert list(lines(source)) == [(1, "ab c"), (4, "天"), (5, "last")]


def test_lines_refused() -> None:
    """Law: a stream without a text, or of other bytes, is refused by its line."""
    none = "standard input holds no text; give one a line."
    latin = "standard input line 2 is not UTF-8: byte 0xff at offset 4; s"
    for data, message in ((b"", none), (b" \n\n", none), (b"ab\nc\xff\n", latin)):
        with pytest.raises(UserError, match=f"^{message}"):
            list(lines(io.BytesIO(data)))

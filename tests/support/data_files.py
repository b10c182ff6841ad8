"""Files of data that are written to be read, or to be refused."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfstep import cli
from halfstep.errors import UserError

LONGEST_MESSAGE = 35
LIBRARY = 20
"""Words of transformers that a message may hold besides, at most."""


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(name: str, content: str | bytes) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cells(table: str) -> list[list[str]]:
    """Return what a table holds: a case a line, " | " between, escaped as in Python."""
    rows = [re.split(r" ?\| ", row) for row in table.strip("\n").splitlines()]
    return [[_unescaped(cell) for cell in row] for row in rows]


def _unescaped(cell: str) -> str:
    return cell.encode("latin-1", "backslashreplace").decode("unicode_escape")


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


class Trap:
    """A value whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def leave(*words: str) -> int:
    """Return the status with which a command ends."""
    try:
        return cli.run(words)
    except SystemExit as left:
        return int(str(left.code))


def complaint(err: str) -> str:
    """Return what follows "halfstep: error: " in the one line of standard error."""
    start, _, line = err.partition("halfstep: error: ")
    assert start == "", err
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert "Traceback" not in line
    return line[:-1]


def refused_command(
    capsys: pytest.CaptureFixture[str], *words: str, most: int = LONGEST_MESSAGE
) -> str:
    """Return the one line that a command prints which ends with status 2."""
    capsys.readouterr()
    assert leave(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = complaint(err)
    assert len(line.split()) <= most + LIBRARY * ("transformers" in line)
    return line


def refused(call: Callable[..., object], *args: Any, **named: Any) -> str:
    """Return the one line in which a call refuses what it was given."""
    with pytest.raises(UserError) as caught:
        call(*args, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert message[-1] in ".?"
    assert len(message.split()) <= LONGEST_MESSAGE
    return message

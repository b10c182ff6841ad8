"""Files of data that are written to be read, or to be refused."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from halfstep.errors import UserError

LONGEST_MESSAGE = 35


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))


def write(name: str, content: str | bytes) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
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


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message.split()) <= LONGEST_MESSAGE
    return message

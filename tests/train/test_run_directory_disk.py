"""The folder of a run on a disk that takes no more: one line, nothing lost.

Started as a program, this file logs and writes under limits on the size of files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ONE_THREAD

from halfstep.errors import UserError
from halfstep.train.output.run_directory import RunFolder

unix = pytest.mark.skipif(sys.platform == "win32", reason="no limits there")

RECORD = {"step": 2, "loss": 0.5, "note": "x" * 200}
LEFT = "Fix that, then go on with --resume."


def tree(root: Path) -> dict[str, str]:
    """Return the name of everything below a folder, and the bytes of files in hex."""
    return {
        str(path.relative_to(root)): path.read_bytes().hex() if path.is_file() else "/"
        for path in root.rglob("*")
    }


def begun(path: Path) -> RunFolder:
    """Return a run with one line of metrics."""
    folder = RunFolder(path)
    folder.begin({"seed": 1}, overwrite=False)
    folder.log({"step": 1, "loss": 1.0})
    return folder


def program(path: Path) -> None:
    """Log and write under limits; print what came of each, as JSON."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = []

    def limited(word: str, limit: int, act: Any) -> None:
        folder = begun(path / f"{word}-{limit}")
        kept = tree(folder.path)
        said = ""
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            act(folder)
        except UserError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        seen.append([word, limit, said, kept == tree(folder.path)])

    for limit in (0, 24, 25, 60, 200):
        limited("log", limit, lambda folder: folder.log(RECORD))
        limited("write", limit, lambda folder: folder.write("summary.json", "y" * 201))
    (path / "seen.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return where the program has run, and what it saw."""
    path = tmp_path_factory.mktemp("disk")
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads((path / "seen.json").read_text())
    return path, found


@unix
def test_metrics_that_are_too_large(ran: tuple[Path, list[Any]]) -> None:
    """Law: a line is refused in one line; what is torn is not read, and goes."""
    path, seen = ran
    found = [each[1:3] for each in seen if each[0] == "log"]
    assert len(found) == 5
    for limit, said in found:
        folder = RunFolder(path / f"log-{limit}")
        assert said == f"{folder.metrics} could not be written: File too large. {LEFT}"
        whole = b'{"step": 1, "loss": 1.0}\n'
        rest = json.dumps(RECORD).encode()[: max(limit - len(whole), 0)]
        assert folder.metrics.read_bytes() == whole + rest
        assert folder.records() == [{"step": 1, "loss": 1.0}]


@unix
def test_a_file_that_is_too_large(ran: tuple[Path, list[Any]]) -> None:
    """Law: a file is refused in one line, and no half of it is there."""
    path, seen = ran
    found = [each[1:] for each in seen if each[0] == "write"]
    assert len(found) == 5
    for limit, said, unchanged in found:
        file = path / f"write-{limit}" / "summary.json"
        assert said == f"{file} could not be written: File too large. {LEFT}"
        assert unchanged, limit


if __name__ == "__main__":
    program(Path(sys.argv[1]))

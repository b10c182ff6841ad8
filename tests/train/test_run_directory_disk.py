"""The folder of a run on a disk that takes no more: one line, nothing lost.

Started as a program, this file logs and writes under limits on the size of files.
"""

import json
import signal
import sys
from itertools import product
from pathlib import Path

import pytest
from data_files import tree
from forks import run_forked

from halfstep.errors import UserError
from halfstep.train.output.run_directory import RunFolder

unix = pytest.mark.skipif(sys.platform == "win32", reason="no limits there")

RECORD = {"step": 2, "loss": 0.5, "note": "x" * 200}
LEFT = "Fix that, then go on with --resume."
LIMITS = (0, 24, 25, 60, 200)


def begun(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.begin({"seed": 1}, overwrite=False)
    folder.log({"step": 1, "loss": 1.0})
    return folder


def program(path: Path) -> None:
    """Log and write under limits; tell what came of each, as JSON."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    uses = {
        "log": lambda folder: folder.log(RECORD),
        "write": lambda folder: folder.write("summary.json", "y" * 201),
    }
    said = {}
    for word, limit in product(uses, LIMITS):
        folder = begun(path / f"{word}-{limit}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            uses[word](folder)
        except UserError as error:
            said[folder.path.name] = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (path / "said.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return where the program has run, and what it said of each folder."""
    path = tmp_path_factory.mktemp("disk")
    (done,) = run_forked(__file__, str(path))
    assert done.returncode == 0, done.stderr
    return path, json.loads((path / "said.json").read_text())


@unix
@pytest.mark.parametrize("limit", LIMITS)
def test_a_file_that_is_too_large(ran: tuple[Path, dict[str, str]], limit: int) -> None:
    """Law: it is refused in one line; no half file is left; a torn line is not read."""
    path, said = ran
    fault = f"could not be written: File too large. {LEFT}"
    file = path / f"write-{limit}" / "summary.json"
    assert said[file.parent.name] == f"{file} {fault}"
    assert tree(file.parent).keys() == tree(path / f"log-{limit}").keys()
    folder = RunFolder(path / f"log-{limit}")
    assert said[folder.path.name] == f"{folder.metrics} {fault}"
    whole = b'{"step": 1, "loss": 1.0}\n'
    rest = json.dumps(RECORD).encode()[: max(limit - len(whole), 0)]
    assert folder.metrics.read_bytes() == whole + rest
    assert folder.records() == [{"step": 1, "loss": 1.0}]


if __name__ == "__main__":
    program(Path(sys.argv[1]))

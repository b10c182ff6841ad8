"""Launches that are told apart, and folders in which one program works at a time."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from halfstep.errors import UserError
from halfstep.train import torchrun
from halfstep.train.output.run_directory import RunFolder

unix = pytest.mark.skipif(sys.platform == "win32", reason="no locks there")

HERE: dict[str, str | None] = {"run_id": None, "agent": "box 7"}
NAMED = HERE | {"run_id": "mine"}

HOLD = """
import os
import sys
from pathlib import Path
from halfstep.train.output.run_directory import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    if not os.fork():
        print("held", flush=True)
    sys.stdin.read()
    os._exit(0)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "held\n"
    return program


def refused(path: Path) -> None:
    with pytest.raises(UserError) as caught, RunFolder(path).locked():
        pass
    assert str(caught.value) == (
        f"{path} is in use by another program; wait for it, or stop it."
    )


# Launches


def test_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: it names the launch and the process that started this one; JSON keeps it."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    found = torchrun.identity()
    assert found.keys() == HERE.keys()
    assert found["run_id"] is None
    assert str(found["agent"]).split(" ")[-1] == str(os.getppid())
    assert json.loads(json.dumps(found)) == found
    assert torchrun.identity() == found
    for name, told in (("none", None), ("", None), ("mine", "mine")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        assert torchrun.identity() == found | {"run_id": told}


@pytest.mark.parametrize(
    ("named", "count", "machines", "begun", "expected"),
    [
        # Processes of this machine have failed.
        (True, "1", "1", {}, True),
        (False, "1", "2", {}, True),
        # Machines of one launch share a name, and nothing else.
        (True, "1", "2", {"agent": "other 7"}, True),
        (False, "1", "2", {"agent": "other 7"}, False),
        # Those of another have failed, of which this one's agent keeps no count.
        (True, "0", "2", {}, True),
        # A first start: the name is an old one, or the program runs twice.
        (True, "0", "2", {"agent": "other 7"}, False),
        (True, "0", "1", {}, False),
        (False, "0", "2", {}, False),
        # Another launch, perhaps later, with the same name, on the same machine.
        (True, "1", "2", {"run_id": "another"}, False),
        (True, "1", "1", {"agent": "box 8"}, False),
    ],
)
def test_started_again(
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    count: str,
    machines: str,
    begun: dict[str, str | None],
    expected: bool,
) -> None:
    """Law: one launch is one name and one agent; on two machines a name is needed.

    A failure on any machine restarts all; each knows what it had begun.
    """
    here = NAMED if named else HERE
    monkeypatch.setattr(torchrun, "identity", lambda: here)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    assert torchrun.is_restart_of(here | begun) is expected
    assert not torchrun.is_restart_of(None)


def test_resumes_after_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: restarted processes go on with what their own launch began, alone."""
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not folder.resumes_after_restart()
    folder.begin({"seed": 1}, overwrite=False)
    assert folder.resumes_after_restart()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not folder.resumes_after_restart()
    # Processes of another machine failed, and all are started again.
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "mine")
        patch.setenv("GROUP_WORLD_SIZE", "2")
        named = RunFolder(tmp_path / "named")
        named.begin({"seed": 1}, overwrite=False)
        assert named.resumes_after_restart()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    began = torchrun.identity() | {"agent": "elsewhere 1"}
    (folder.path / "launch.json").write_text(json.dumps(began))
    assert not folder.resumes_after_restart()


# Claims


@unix
def test_a_second_program(tmp_path: Path) -> None:
    """Law: it is refused until the first one ends.

    One that is killed locks nobody out, nor does a child that outlives it.
    """
    path = tmp_path / "run"
    first = hold(path)
    refused(path)
    first.kill()
    first.wait()
    for _ in range(2):
        with RunFolder(path).locked():
            refused(path)
    first.communicate("")


@unix
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_without_locks(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where there are no locks nothing is claimed."""
    no_lock = OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=no_lock))
    with RunFolder(tmp_path).locked(), RunFolder(tmp_path).locked():
        pass


@unix
def test_a_place_that_cannot_be_held(tmp_path: Path) -> None:
    """Law: below a file nothing is made; the reason is told as of any --out."""
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "run"
    with pytest.raises(UserError) as caught, RunFolder(path).locked():
        pass
    assert str(caught.value) == (
        f"--out {path} cannot be written: Not a directory; choose another folder."
    )
    assert [each.name for each in tmp_path.rglob("*")] == ["file"]


def test_read(tmp_path: Path) -> None:
    """Law: an identity that was written is read; anything else is none."""
    path = tmp_path / "launch.json"
    assert torchrun.read_identity(path) is None
    for text in ("", "{", "[]", "3", "{}", '{"run_id": 1}', '{"agent": "a"}'):
        path.write_text(text)
        assert torchrun.read_identity(path) is None, text
    path.write_text(json.dumps(torchrun.identity()))
    assert torchrun.read_identity(path) == torchrun.identity()

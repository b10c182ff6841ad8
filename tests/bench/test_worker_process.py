"""Contenders in processes of their own: questions, answers, and how they end."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import TYPE_CHECKING

import pytest

from halfstep.bench import recipe, worker_process
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ECHO = """
import ctypes, json, os, signal, subprocess, sys
from halfstep.bench import worker_process as living

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks "
                "uordblks fordblks keepcost".split()]

def mapped():
    # Bytes that malloc has from the system, as itself counts them.
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = Mallinfo
    return mallinfo().arena + mallinfo().hblkhd

print("noise before")

def answer(question):
    print("noise of Python")
    subprocess.run([sys.executable, "-c", "print('noise of another')"])
    if question == "fall":
        raise ValueError("fell over")
    if question == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if question == "hold":
        held = bytearray(2**26)
        before = mapped()
        del held
        return {"freed": before - mapped()}
    names = ("PLANTED", "OMP_WAIT_POLICY")
    return {"asked": question, "set": [os.environ.get(name) for name in names],
            "task": json.loads(sys.argv[1])}

living.serve(answer)
"""

Start = "Callable[[Mapping[str, str]], living.WorkerProcess]"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a process that echoes; it writes its first noise nowhere."""
    program = ECHO.replace('print("noise before")\n', "")
    (tmp_path / "echo_program.py").write_text(program, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def starting(environment: Mapping[str, str]) -> worker_process.WorkerProcess:
        task = {"number": 1.5, "word": "\u00e9"}
        environment = {"PYTHONPATH": path} | dict(environment)
        return worker_process.WorkerProcess("echo", "echo_program", task, environment)

    return starting


def test_questions_and_answers(start: Start) -> None:
    """Law: each question is answered, whatever is printed meanwhile by whomever.

    The environment is as told, and threads that wait sleep.
    """
    with start({"PLANTED": "here"}) as process:
        for question in (3, "word", None, [1, {"a": 2.5}]):
            assert process.request(question) == {
                "asked": question,
                "set": ["here", "PASSIVE"],
                "task": {"number": 1.5, "word": "\u00e9"},
            }
    assert process._process.returncode == 0


def test_a_fall(start: Start) -> None:
    """Law: a process that fails is told of with its name, status and last words."""
    with start({}) as process:
        process.request(1)
        with pytest.raises(UserError) as caught:
            process.request("fall")
        expected = "contender echo ended with status 1: ValueError: fell over"
        assert str(caught.value) == expected
        with pytest.raises(UserError) as again:
            process.request(1)
        assert str(again.value) == expected


def test_a_sudden_end(start: Start) -> None:
    """Law: one that the system ends is told of too: the status is the signal."""
    with start({}) as process, pytest.raises(UserError) as caught:
        process.request("kill")
    assert "contender echo ended with status -9: " in str(caught.value)


def test_trouble_of_ours(start: Start) -> None:
    """Law: where we fail, the process does not outlive us."""
    process = start({})

    def fail() -> None:
        with process:
            process.request(1 / 0)

    process.request(1)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert process._process.returncode == -9


def test_one_that_does_not_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a process that does not end when nothing is left to ask is made to."""
    monkeypatch.setattr(worker_process, "_TIMEOUT", 0)
    with start({}) as process:
        process.request(1)
        waits: list[float | None] = []
        whole = process._process.communicate

        def late(timeout: float | None = None) -> tuple[str, str]:
            waits.append(timeout)
            if timeout is not None:
                raise subprocess.TimeoutExpired([], timeout)
            return whole()

        monkeypatch.setattr(process._process, "communicate", late)
    assert waits == [0, None]
    assert process._process.returncode == -9


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunables are glibc's")
def test_memory_is_kept(start: Start) -> None:
    """Law: memory that was freed goes back to the system, unless it is to be kept."""
    with start({}) as process:
        assert process.request("hold")["freed"] >= 2**26
    with start({"GLIBC_TUNABLES": recipe.KEEP_MEMORY}) as process:
        assert process.request("hold")["freed"] == 0


def test_memory_is_counted_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what this process holds, and has held at most, is what the system says.

    Where it does not say, it is the most that was held.
    """
    status = tmp_path / "status"
    monkeypatch.setattr(worker_process, "Path", lambda _: status)
    monkeypatch.setattr(worker_process.hardware, "peak_memory", lambda _: 7)
    assert (worker_process.resident("cpu"), worker_process.peak_resident("cpu")) == (
        7,
        7,
    )
    status.write_text("Name:\tpython\nVmHWM:\t  3 kB\nVmRSS:\t  2 kB\nan odd line\n")
    assert (worker_process.resident("cpu"), worker_process.peak_resident("cpu")) == (
        2048,
        3072,
    )

"""Candidates in processes of their own: questions, answers, and how they end."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from halfstep.bench import worker_process
from halfstep.errors import UserError
from halfstep.machine import cpu, hardware

ECHO = """
import os, signal, subprocess, sys

def worker(**task):
    def answer(question):
        print("noise of Python")
        subprocess.run([sys.executable, "-c", "print('noise of another')"])
        if question == "fail":
            raise ValueError("failed")
        if question == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        names = ("PLANTED", "OMP_WAIT_POLICY")
        return {"asked": question, "set": [os.environ.get(name) for name in names],
                "task": task}
    return answer
"""

TASK = {"number": 1.5, "word": "\u00e9"}
Start = Callable[..., worker_process.WorkerProcess]


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    (tmp_path / "echo_program.py").write_text(ECHO, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return partial(worker_process.WorkerProcess, "echo", "echo_program", TASK)


def test_questions_and_answers(echo: Start) -> None:
    """Law: each question is answered, whatever is printed meanwhile by whomever.

    The environment is as given; by default threads that wait sleep. A process that
    fails is reported with its name, status and last line.
    """
    with echo({"PLANTED": "here"}) as process:
        for question in (3, "word", None, [1, {"a": 2.5}]):
            assert process.request(question) == {
                "asked": question,
                "set": ["here", None],
                "task": TASK,
            }
        for question in ("fail", 1):
            with pytest.raises(UserError) as caught:
                process.request(question)
            expected = "candidate echo ended with status 1: ValueError: failed"
            assert str(caught.value) == expected
    with echo() as process:
        assert process.request()["set"] == [None, "PASSIVE"]
    assert process.process.returncode == 0


def test_a_sudden_end(echo: Start) -> None:
    """Law: a process that the system ends is reported, too: with the signal."""
    with echo({}) as process, pytest.raises(UserError) as caught:
        process.request("kill")
    assert str(caught.value) == "candidate echo was killed by signal 9."


def test_an_error_of_ours(echo: Start) -> None:
    """Law: where the caller fails, the process is killed."""
    process = echo({})

    def fail() -> None:
        with process:
            process.request(1 / 0)

    process.request(1)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert process.process.returncode == -9


def test_one_that_does_not_end(echo: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a process that does not end when nothing is left to ask is made to."""
    monkeypatch.setattr(worker_process, "TIMEOUT_S", 0)
    with echo({}) as process:
        process.request(1)
        waits: list[float | None] = []
        whole = process.process.communicate

        def late(timeout: float | None = None) -> tuple[str, str]:
            waits.append(timeout)
            if timeout is not None:
                raise subprocess.TimeoutExpired([], timeout)
            return whole()

        monkeypatch.setattr(process.process, "communicate", late)
    assert waits == [0, None]
    assert process.process.returncode == -9


def test_memory_is_counted_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: memory is what the system counts; without a count, it is the peak."""
    monkeypatch.setattr(cpu, "PROC", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "peak_memory", lambda _: 7)
        assert worker_process.resident("cpu") == 7
    (tmp_path / "self").mkdir()
    status = tmp_path / "self" / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  3 kB\nVmRSS:\t  2 kB\nan odd line\n")
    assert worker_process.resident("cpu") == 2048
    assert hardware.peak_memory("cpu") == 3072


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's /proc")
def test_reset_peak() -> None:
    """Law: what was freed before counts neither as resident nor for the peak."""
    size = 2**26
    torch.ones(size, dtype=torch.uint8)
    before = hardware.peak_memory("cpu")
    worker_process.reset_peak("cpu")
    assert hardware.peak_memory("cpu") < before
    between = hardware.peak_memory("cpu")
    torch.ones(size, dtype=torch.uint8)
    assert hardware.peak_memory("cpu") > between + size / 2

"""Runs candidates in processes of their own, which compute only on request.

So settings of a process, such as its allocator, can be compared within one run, and
only one process computes at a time: the others wait for a line of input.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from halfstep.errors import UserError
from halfstep.machine import cpu, hardware

if TYPE_CHECKING:
    from collections.abc import Mapping

PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment that lets waiting threads sleep at once: by default OpenMP threads spin
for a while, on cores that the next candidate needs."""

TIMEOUT_S = 30
"""Seconds in which a process without requests must exit."""


class WorkerProcess:
    """A process that answers requests; both are lines of JSON.

    The function `worker` of a module takes the task as keyword arguments, plain values,
    and returns what answers; `name` is for messages.
    """

    def __init__(
        self,
        name: str,
        module: str,
        task: Mapping[str, Any],
        environment: Mapping[str, str] = PASSIVE_WAIT,
    ) -> None:
        self.name = name
        # A file, because an unread pipe would fill up and block the process.
        self._stderr = tempfile.TemporaryFile(  # noqa: SIM115 -- closed by __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | dict(environment),
            text=True,
        )

    def request(self, question: Any = None) -> dict[str, Any]:  # noqa: ANN401 -- any JSON
        """Send a request; return the answer.

        Raises:
            UserError: If the process has ended; includes the last line of its errors.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin  # noqa: S101 -- both are pipes
        assert stdout  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # reported below, with its reason
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            status = self.process.wait(TIMEOUT_S)
            message = f"candidate {self.name} was killed by signal {-status}."
            if status >= 0:  # otherwise the last line is no reason
                self._stderr.seek(0)
                last = (self._stderr.read().strip().splitlines() or ["no output"])[-1]
                message = f"candidate {self.name} ended with status {status}: {last}"
            raise UserError(message)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        """Let the process exit; kill it on a timeout, or at once on an exception."""
        if error is not None:
            self.process.kill()
        try:
            self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._stderr.close()


def main(module: str, task: str) -> None:
    """Run as a worker: answer each line of standard input until it ends.

    Everything that libraries print goes to standard error.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        # Python's buffer would be flushed last, after an error's traceback.
        with contextlib.redirect_stdout(sys.stderr):
            answer = import_module(module).worker(**json.loads(task))
            for line in sys.stdin:
                print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def resident(device: str) -> int:
    """Return the current resident bytes; on a GPU, what torch allocated.

    The peak so far, if the system does not report the current value.
    """
    current = cpu.memory("VmRSS") if device == "cpu" else None
    return hardware.peak_memory(device) if current is None else current


def reset_peak(device: str) -> None:
    """Return freed memory to the system, and measure the peak from now on.

    Where the C library or the system cannot, the peak stays that of the whole process.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Contenders in processes of their own that stay alive and work only when asked.

In: a module, a task, changes of the environment. Out: an answer to each question. What
is set for a process, such as its allocator, is then compared within one run, and one
process computes at a time: the others wait for a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from halfstep.bench import journal
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment in which the threads of a process that waits sleep at once: by OpenMP's
defaults they spin for a while, on processors that the next contender needs."""

_TIMEOUT = 30
"""Seconds in which a process without questions must end by itself."""


class WorkerProcess:
    """A process that answers questions, each a line of JSON, as is the answer.

    Args:
        name: For people.
        module: One that calls `serve` when it is the program.
        task: Plain values; the program's only argument, as JSON.
        environment: What is set for it, beside `PASSIVE_WAIT`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        task: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        # A file: a pipe that nobody reads while it works would fill up and block it.
        self._stderr = tempfile.TemporaryFile(  # noqa: SIM115 -- closed by __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ
            | hardware.child_environment()
            | PASSIVE_WAIT
            | dict(environment),
            text=True,
        )

    def request(self, question: Any = None) -> dict[str, Any]:  # noqa: ANN401 -- any JSON
        """Put a question; wait for the answer.

        Raises:
            UserError: If the process has ended, with its last words.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin  # noqa: S101 -- both are pipes
        assert stdout  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # told below, with its reason
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise UserError(self._exit_message())
        answer: dict[str, Any] = json.loads(line)
        journal.record(self.name, **answer)
        return answer

    def _exit_message(self) -> str:
        status = self._process.wait(_TIMEOUT)
        self._stderr.seek(0)
        last = (self._stderr.read().strip().splitlines() or ["no output"])[-1]
        return f"contender {self.name} ended with status {status}: {last}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it end, or make it: at once if we are in trouble ourselves."""
        if error is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._stderr.close()


def serve(
    answer: Callable[[Any], dict[str, Any]], begin: Callable[[], object] | None = None
) -> None:
    """Be such a process: answer each line of standard input until there is none.

    What is printed meanwhile, by whatever library, goes to standard error.

    Args:
        answer: From a question to its answer.
        begin: Called first.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        # Python's own buffer would be emptied last, behind the words of an error.
        with contextlib.redirect_stdout(sys.stderr):
            if begin is not None:
                begin()
            for line in sys.stdin:
                print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def resident(device: str) -> int:
    """Return the bytes that this process holds now; on a GPU, what torch allocated.

    Where the system does not tell, the most that it has held so far.
    """
    return _memory("VmRSS") if device == "cpu" else hardware.peak_memory(device)


def peak_resident(device: str) -> int:
    """Return the most bytes that this process has held so far.

    Why: what `getrusage` tells begins at what the parent held when it started us.
    """
    return _memory("VmHWM") if device == "cpu" else hardware.peak_memory(device)


def _memory(key: str) -> int:
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if key in fields:
            return int(fields[key].split()[0]) * 1024
    return hardware.peak_memory("cpu")

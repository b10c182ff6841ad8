"""Programs in processes forked from one that has torch: each begins 2 seconds sooner.

In: a file, its arguments and environment. Out: what it said, once it has ended.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import wide_matmuls

from halfstep import launch

_FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = [
    *("forks", "torch._dynamo", "torch.distributed.fsdp"),
    *("halfstep.session.factory", "halfstep.train.run", "matplotlib.figure"),
    "transformers.models.bert.modeling_bert",
]


def run_forked(
    file: str,
    *arguments: str,
    environments: Sequence[Mapping[str, str]] = ({},),
    timeout: float = 120,
    kill: bool = True,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in one process for each environment, all at once.

    Args:
        file: Run as `python file` would, in the file's folder for a script of a test's
            own; torch has been imported, and has one thread.
        arguments: What it is told.
        environments: Added to this process's.
        timeout: Seconds after which they count as stuck.
        kill: Whether all are killed where one fails.

    Returns:
        For each process what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        _FORKS.set_forkserver_preload(_IMPORTED)  # not for servers that programs start
        with pytest.MonkeyPatch.context() as patch:  # else none of ours is found
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            forkserver.ensure_running()
        running = [
            _FORKS.Process(
                target=_become,
                args=(file, arguments, {**os.environ, **each}, f"{folder}/{number}"),
            )
            for number, each in enumerate(environments)
        ]
        for process in running:
            process.start()
        waiting = list(running)
        while waiting and not (kill and any(process.exitcode for process in running)):
            sentinels = [process.sentinel for process in waiting]
            if not connection.wait(sentinels, timeout):
                for process in waiting:
                    os.kill(process.pid, signal.SIGABRT)  # faulthandler says where
                    process.join()
                said = [
                    Path(f"{folder}/{n}.2").read_text() for n in range(len(running))
                ]
                raise AssertionError(
                    f"{file} {arguments} is stuck:\n" + "\n".join(said)
                )
            waiting = [process for process in running if process.is_alive()]
        for process in waiting:
            process.kill()
        for process in running:
            process.join()
        return [
            subprocess.CompletedProcess(
                [file, *arguments],
                process.exitcode or 0,
                *(Path(f"{folder}/{number}.{fd}").read_text() for fd in (1, 2)),
            )
            for number, process in enumerate(running)
        ]


def run_ranks(
    file: str,
    *arguments: str,
    processes: int = 2,
    timeout: float = 120,
    check: bool = True,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in several processes as torchrun does; all must end well.

    Without `check` each ends by itself.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    together = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [
        together | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(processes)
    ]
    words = (file, *arguments)
    ended = run_forked(*words, environments=ranks, timeout=timeout, kill=check)
    texts = "\n".join(each.stderr for each in ended)
    assert not check or not any(each.returncode for each in ended), texts
    return ended


_PROGRAM: dict[str, Any] = {}
"""What the program has named, alive until its process ends: where a DDP model is freed,
gloo's thread at times waits for the interpreter that waits for it, without us too."""


def _become(
    file: str, arguments: Sequence[str], environment: dict[str, str], output: str
) -> None:
    for fd in (1, 2):
        os.dup2(os.open(f"{output}.{fd}", os.O_WRONLY | os.O_CREAT), fd)
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    if "WIDE_MATMULS" in environment:
        wide_matmuls.install()
    try:
        launch.autoload()  # as the end of `import torch` does
        _PROGRAM.update(runpy.run_path(file, run_name="__main__"))
    finally:
        atexit._run_exitfuncs()

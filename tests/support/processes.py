"""Programs in processes of their own, and process groups.

In: the words of a program. Out: what it said, once it has ended well.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from halfstep.distributed import process_group


def torchrun(
    file: str, *arguments: str, processes: int = 2, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program in several processes.

    Args:
        file: The program's file; or "-m", before the name of a module.
        arguments: What each process is told.
        processes: How many there are.
        timeout: Seconds after which they count as stuck.

    Returns:
        What they said together.
    """
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(processes), file, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def group(timeout: timedelta) -> Iterator[None]:
    """Be one of the processes that torchrun started; meet by gloo.

    Args:
        timeout: After which a collective counts as stuck.
    """
    dist.init_process_group("gloo", timeout=timeout)
    yield
    dist.barrier()
    # A thread of gloo's that lets go of the last tensors asks for the GIL. It must
    # not do so while the interpreter ends: that aborts the process.
    time.sleep(0.2)
    dist.destroy_process_group()


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    started = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (started | {"MASTER_PORT": "0"}).items():
            patch.setenv(name, value)
        with process_group.join("cpu"):
            yield

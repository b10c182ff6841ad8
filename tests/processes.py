"""Programs in processes of their own, and process groups.

In: the words of a program. Out: what it said, once it has ended well.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from halfstep import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment: sums depend on how many threads share them."""


def torchrun(
    file: str, *arguments: str, processes: int = 2, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program in several processes, each with one thread.

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
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Be joined as the one process that torchrun started."""
    started = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (started | {"MASTER_PORT": "0"}).items():
            patch.setenv(name, value)
        with distributed.join("cpu"):
            yield

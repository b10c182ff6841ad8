"""Programs over shards, all those of one test file in one start of processes."""

import functools
import importlib
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import run_ranks
from processes import group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halfstep.machine import hardware


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def process(file: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    hardware.emulation_warning = lambda *_: None  # type: ignore[assignment]
    with group(timedelta(seconds=60)):
        found = {
            name: _attempt(case)
            for name, case in importlib.import_module(file).CASES.items()
        }
        torch.save(found, folder / f"{dist.get_rank()}.pt")


def _attempt(case: Callable[[], dict[str, Any]]) -> Any:
    try:
        return case()
    except Exception:  # noqa: BLE001 -- told by the test
        return traceback.format_exc()


def shared() -> Path:
    return Path(sys.argv[3])


@functools.cache
def start(file: str, processes: int, common: str = "") -> list[dict[str, Any]]:
    """Return what each of some processes saw, by the name of the case.

    Args:
        file: Name of the test file.
        processes: How many there are.
        common: A folder for files that outlive them.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(__file__, file, folder, common, processes=processes, timeout=180)
        files = [Path(folder) / f"{rank}.pt" for rank in range(processes)]
        return [torch.load(path, weights_only=False) for path in files]


if __name__ == "__main__":
    process(sys.argv[1], Path(sys.argv[2]))

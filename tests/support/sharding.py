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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from halfstep.machine import hardware
from halfstep.session.fsdp import fsdp_policy


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def session_of(
    kind: str, *, shard: bool, name: str = "adamw", **more: Any
) -> hs.Session:
    level, dtype = kind.split()
    model = network()
    if shard:
        policy = fsdp_policy(level, dtype)
        fully_shard(model[0], mesh=mesh(), mp_policy=policy)
        fully_shard(model, mesh=mesh(), mp_policy=policy)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return hs.prepare(model, optimizer, level, dtype=dtype, **more)


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

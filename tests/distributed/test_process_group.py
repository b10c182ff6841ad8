"""Ranks that join, agree and leave together, and what DDP exchanges for a session."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from processes import group_of_one
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import halfstep as hs
from halfstep.distributed.ddp import data_parallel
from halfstep.distributed.process_group import (
    World,
    all_gather_object,
    all_reduce_sum,
    barrier,
    join,
    once_per_machine,
)
from halfstep.errors import UserError

ALONE = World(0, 1, torch.device("cpu"))
ONE_OF_TWO = World(0, 2, torch.device("cpu"))


def process(folder: Path) -> None:
    with join("cpu") as world:
        found: dict[str, Any] = {
            "world": (world.rank, world.size, world.is_first),
            "total": all_reduce_sum(torch.tensor([float(world.rank), 5.0])),
        }
        del os.environ["LOCAL_WORLD_SIZE"]  # launchers other than torchrun set none
        found["pid"] = once_per_machine(os.getpid)
        found["pids"] = all_gather_object(os.getpid())
        with pytest.raises(UserError, match="no such file"):
            once_per_machine(fail)
        barrier()
        if world.is_first:
            time.sleep(0.5)  # who leaves before has not waited
        torch.save(found, folder / f"{world.rank}.pt")
    assert not dist.is_initialized()
    assert (folder / "0.pt").exists()


def fail() -> None:
    if dist.get_rank() == 0:
        message = "no such file"
        raise UserError(message)


def test_agreement(tmp_path: Path) -> None:
    """Law: sums are the same on every rank; one rank leads.

    What is done once for a machine is done by its first rank; so is an error.
    """
    run_ranks(__file__, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert [rank["world"] for rank in ranks] == [(0, 2, True), (1, 2, False)]
    assert [rank["total"].tolist() for rank in ranks] == [[1.0, 10.0]] * 2
    assert [rank["pid"] for rank in ranks] == [rank["pids"][0] for rank in ranks]
    assert ranks[0]["pids"] == ranks[1]["pids"]


@pytest.mark.parametrize("kind", ["O0 fp32", "O1 bf16"])
def test_gradients_travel_once_a_step(kind: str) -> None:
    """Law: without masters, two micro-batches exchange once, in the last of them."""
    level, dtype = kind.split()
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = hs.prepare(model, optimizer, level, dtype=dtype, accumulate=2)
    exchanged: list[int] = []
    with group_of_one():
        session.model = data_parallel(session.model, ONE_OF_TWO)
        everyone = dist.group.WORLD
        assert everyone is not None
        session.model.register_comm_hook(  # type: ignore[operator]
            exchanged,
            # No def: DDP reads annotations, and takes none that are text.
            lambda log, bucket: log.append(1) or allreduce_hook(everyone, bucket),
        )
        counts = []
        for _ in range(4):
            with session.autocast():
                loss = session.model(torch.ones(2, 6)).float().sum()
            session.backward(loss)
            session.step()
            counts.append(len(exchanged))
    assert counts == [0, 1, 1, 2]


def test_one_process_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without torchrun nothing is joined, wrapped, summed or waited for."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    model, value = nn.Linear(2, 2), torch.tensor([3.0])
    with join("cpu") as world:
        assert world == ALONE
        assert world.is_first
        assert data_parallel(model, world) is model
        assert all_reduce_sum(value) is value
        barrier()
    assert value.tolist() == [3.0]
    assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_leaving(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Law: a process waits for all and for its threads; after an error, for these."""
    waits: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: waits.append("for all"))
    monkeypatch.setattr(time, "sleep", lambda _: waits.append("for threads"))
    message = "inside"
    with contextlib.suppress(RuntimeError), group_of_one():
        assert dist.is_initialized()
        if fails:
            raise RuntimeError(message)
    assert waits == (["for threads"] if fails else ["for all", "for threads"])
    assert not dist.is_initialized()


if __name__ == "__main__":
    process(Path(sys.argv[1]))

"""First bad operation among several processes: one asks alone, or all do.

The cases run in two processes that torchrun starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from planted_faults import FAULTS, Run
from planted_models import INNER
from ranks import saw, start
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from halfstep import distributed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

DDP = ("mlp data nan", "cnn cast eager", "bert amplified eager", "cnn root eager")
SHARDED = ("bert overflow eager", "bert amplified eager", "bert root eager")


def wrapped(run: Run, *, sharded: bool) -> nn.Module:
    """Return the model as its processes share it."""
    if sharded:
        for layer in run.model.encoder.layers:
            fully_shard(layer)
        fully_shard(run.model)
        return run.model
    return torch.nn.parallel.DistributedDataParallel(run.model)


def alone(name: str) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """Return a case in which one process alone has a fault, and runs it again."""

    def case(group: dist.ProcessGroup) -> dict[str, Any]:
        fault = FAULTS[name]
        run = Run(**fault.run)
        model = torch.nn.parallel.DistributedDataParallel(
            run.model, process_group=group
        )
        right, said = None, ""
        if dist.get_rank() == 1:
            fault.plant(run)
            bad = hs.first_bad(model, lambda: run.step(model), scale=run.scale)
            right = fault.judge(bad)
            said = str(bad)
        return {"right": right, "said": said}

    return case


def together(name: str) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """Return a case in which a model in shards is run again, by all."""

    def case(group: dist.ProcessGroup) -> dict[str, Any]:
        del group
        fault = FAULTS[name]
        run = Run(**fault.run)
        if dist.get_rank() == 1 or "overflow" in name:
            fault.plant(run)
        model = wrapped(run, sharded=True)
        bad = hs.first_bad(model, lambda: run.step(model), scale=run.scale)
        first = distributed.first_given(bad)
        left = sum(p.grad is not None for p in model.parameters())
        return {"right": fault.judge(first), "left": left, "said": str(bad)}

    return case


CASES = {f"alone {name}": alone(name) for name in DDP}
CASES |= {f"together {name}": together(name) for name in SHARDED}


@pytest.mark.parametrize("name", DDP)
def test_one_process_asks_alone(name: str) -> None:
    """Law: under DDP a replay exchanges nothing: no other process need take part."""
    ranks = saw(start(2, ("test_replay_ranks",)), f"alone {name}")
    assert ranks[0]["right"] is None
    assert ranks[1]["right"] == (True, True, True), ranks[1]["said"]


@pytest.mark.parametrize("name", SHARDED)
def test_all_ask_together(name: str) -> None:
    """Law: under FSDP2 all replay as often, whoever has the fault, and are told."""
    for rank in saw(start(2, ("test_replay_ranks",)), f"together {name}"):
        assert rank["right"] == (True, True, True), rank["said"]
        assert rank["left"] == 0


def test_the_place_is_in_the_middle() -> None:
    """Law: what is planted in shards lies inside of one that is gathered."""
    assert INNER["bert"].startswith("encoder.layers.1")

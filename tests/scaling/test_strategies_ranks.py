"""Strategies on two ranks that see different data.

Started by `run_ranks`, this file is the program of one process; it writes what it saw.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from processes import group
from scale_loop import CLEAN, NETS, RULE
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from halfstep.scaling.loss_scale import ScaleState
from halfstep.scaling.strategies import MeasuredStrategy, ScaleStrategy, make_strategy

SIZES = 1.0, 2.0**12
"""Of each rank's loss: a rank left alone would choose its own scale."""
KINDS = "ddp", "root", "nested"


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = NETS["norm"]()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "nested":
        for layer in net.children():
            fully_shard(layer)
    return fully_shard(net)  # type: ignore[return-value]


def asked(kind: str, own: ScaleStrategy, rank: int) -> Any:
    net = wrapped(kind)
    # Low enough that nothing overflows: an overflow is the same on all ranks.
    state = replace(ScaleState.first(RULE), scale=torch.tensor(2.0))
    torch.manual_seed(rank)
    answers: list[Tensor | None] = []
    for step in range(3):
        with torch.autocast("cpu", torch.float16):
            out = net(torch.randn(4, 8))
        loss = out.float().square().mean() * SIZES[rank]
        first = own.on_loss(loss, state)
        answers += [first] if step == 0 else []
        state = state if first is None else replace(state, scale=first)
        (loss * state.scale).backward()
        gradients = [
            p.grad / state.scale for p in net.parameters() if p.grad is not None
        ]
        answers.append(own.propose(gradients, state, CLEAN))
        net.zero_grad()
    numbers = [None if answer is None else answer.item() for answer in answers]
    return numbers, own.state_dict()


def process(folder: Path) -> None:
    with group(timedelta(seconds=60)):
        rank = dist.get_rank()
        seen = {}
        for kind in KINDS:
            seen[kind, "measured"] = asked(kind, MeasuredStrategy(every=2), rank)
            seen[kind, "logmax"] = asked(kind, make_strategy("logmax"), rank)
        torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ["measured", "logmax"])
def test_ranks_ask_for_the_same(
    kind: str, word: str, ranks: list[dict[Any, Any]]
) -> None:
    """Law: whatever a rank saw, all of them get one scale.

    Measured tries where no node is written in Python, as FSDP's between layers are.
    """
    one, other = (seen[kind, word] for seen in ranks)
    assert one == other
    begin, *wishes = [answer is not None for answer in one[0]]
    assert begin == (word == "measured" and kind != "nested")
    assert wishes == ([True, False, True] if word == "measured" else [True] * 3)


if __name__ == "__main__":
    process(Path(sys.argv[1]))

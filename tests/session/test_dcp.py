"""A session among other things that torch.distributed.checkpoint saves and loads."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import run_ranks
from small_training import same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.session.session import Session
from halfstep.testing import assert_unchanged

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:fp16 .*emulate"),
]
CASES: dict[str, dict[str, Any]] = {
    "O1 fp16": {"loss_scale": "dynamic"},
    "O1 bf16": {},
    "O2 bf16": {},
    "O2 bf16 split": {"master": "split"},
    "O2 bf16 kahan": {"master": "kahan"},
    "O2 bf16 stochastic": {"master": "stochastic"},
    "O2 fp16": {"loss_scale": "measured"},
    "O3 bf16": {},
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2),
    "SGD": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9, dampening=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
}
INPUTS = torch.randn(12, 16, 8, generator=torch.Generator().manual_seed(1))


def new(case: str, optimizer: str, seed: int) -> Session:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    steps = OPTIMIZERS[optimizer](model.parameters())
    level, dtype, *_ = case.split()
    return hs.prepare(
        model,
        steps,
        level,
        dtype=dtype,
        scheduler=torch.optim.lr_scheduler.StepLR(steps, 2),
        **CASES[case],
    )


def train(session: Session, first: int, last: int) -> list[float]:
    losses = []
    for x in INPUTS[first:last]:
        with session.autocast():
            loss = session.model(x).square().mean()
        session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


def round_trip(case: str, optimizer: str, folder: Path, first: int) -> None:
    session, loaded = (new(case, optimizer, seed) for seed in (0, 1))
    if dist.is_initialized():
        for each in (session, loaded):
            each.model = DistributedDataParallel(each.model)
    train(session, 0, first)
    other = torch.arange(3.0)
    state = {"train": hs.sharded.Stateful(session), "other": other}
    with assert_unchanged(session):
        dcp.save(state, checkpoint_id=folder)
    target = {"train": hs.sharded.Stateful(loaded), "other": torch.zeros(3)}
    dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["other"], other)
    assert same(session.state_dict(), loaded.state_dict())
    assert train(session, first, 12) == train(loaded, first, 12)
    assert same(session.state_dict(), loaded.state_dict())


@pytest.mark.parametrize(
    ("case", "optimizer", "first"),
    [
        *itertools.product(CASES, ["AdamW"], [6]),
        *itertools.product(["O2 bf16"], OPTIMIZERS, [0, 6]),
    ],
)
def test_round_trip(case: str, optimizer: str, first: int, tmp_path: Path) -> None:
    """Law: saved and loaded into a new session, a run goes on to the bit.

    Saved before the first step, too, which a look at the state must not change.
    """
    round_trip(case, optimizer, tmp_path, first)


def test_ranks(tmp_path: Path) -> None:
    """Law: under DDP, too."""
    run_ranks(__file__, str(tmp_path))


def test_grad_scaler(tmp_path: Path) -> None:
    """Law: a `GradScaler` is saved and loaded as torch's is."""
    scaler = hs.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    dcp.save({"scaler": scaler}, checkpoint_id=tmp_path)
    loaded = hs.GradScaler("cpu")
    loaded.scale(torch.ones(()))
    dcp.load({"scaler": loaded}, checkpoint_id=tmp_path)
    assert loaded.get_scale() == 64.0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in ("O1 bf16", "O2 bf16 kahan"):
        round_trip(case, "AdamW", Path(sys.argv[1]) / case, 6)
    dist.destroy_process_group()

"""A saved session goes on to the bit: each of torch's optimizers, at each level.

Saved as a file, or with other things by torch.distributed.checkpoint.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import run_ranks
from grids import thinned
from master_cases import OPTIMIZERS
from portable import Net, bits, train
from small_training import same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.checkpoint import single
from halfstep.scaling import ScaleRule
from halfstep.session.session import Session
from halfstep.testing import assert_unchanged

KINDS = (
    *("O0 fp32 fp32", "O1 bf16 fp32", "O1 fp16 fp32"),
    *("O2 bf16 fp32", "O2 fp16 fp32", "O2 bf16 split", "O2 bf16 kahan"),
    *("O2 bf16 stochastic", "O2 bf16 none", "O2 fp16 none", "O3 bf16 none"),
    "O3 fp16 none",
)
"""Level, format, form of master weights."""


def start(name: str, kind: str, seed: int = 0) -> Session:
    level, dtype, master = kind.split()
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    model = nn.Sequential(*layers) if name == "muon" else Net(gain=0.5)
    optimizer = OPTIMIZERS[name](model.parameters())
    for group in optimizer.param_groups:
        if isinstance(group.get("eps"), float):
            group["eps"] = 2.0**-10  # fp16 rounds 1e-8 to 0
    scale = ScaleRule(init_scale=16.0) if dtype == "fp16" else "none"
    more = {"master": master} if level == "O2" else {}
    more["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return hs.prepare(model, optimizer, level, dtype=dtype, loss_scale=scale, **more)


def saved(session: Session, folder: Path) -> Any:
    """Return a session's state that was in a checkpoint."""
    state = session.state_dict()
    rest = {key: value for key, value in state.items() if key != "weights"}
    single.save(folder, state["weights"], rest, {}, replace=True)
    found = single.load(folder)
    return found.state | {"weights": found.weights}


def test_every_optimizer_is_here() -> None:
    """Law: the table has each of torch's, but for those that no session takes."""
    known = {
        type(make([nn.Parameter(torch.ones(2, 2))])) for make in OPTIMIZERS.values()
    }
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    missing = kinds - known - {torch.optim.Optimizer, torch.optim.LBFGS}
    assert missing == {torch.optim.SparseAdam}


@pytest.mark.parametrize(
    ("name", "kind"),
    thinned({n: (n,) for n in OPTIMIZERS}, {k: (k,) for k in KINDS}, 6),
)
def test_resumed_is_uninterrupted(name: str, kind: str, tmp_path: Path) -> None:
    """Law: four steps, a skip, a file, a new session, three steps: as at one go.

    What was loaded stays as it was, and no random number of torch's plays a part.
    """
    whole, first, second = (start(name, kind) for _ in range(3))
    for session in (whole, first):
        train(session, *range(4))
        train(session, 4, factor=torch.inf)
    train(whole, *range(4, 7))
    state = saved(first, tmp_path)
    assert [state["level"], state["dtype"]] == kind.split()[:2]
    before = copy.deepcopy(state)
    train(second, 9)
    second.load_state_dict(state)
    assert same(bits(second), bits(first))
    assert (second.steps_applied, second.steps_skipped) == (4, 1)
    torch.manual_seed(99)
    train(second, *range(4, 7))
    assert same(state, before)
    assert same(bits(second), bits(whole))


@pytest.mark.parametrize(
    ("name", "to"),
    [("nadam", "O2 bf16 kahan"), ("asgd", "O3 bf16 none"), ("adafactor", KINDS[1])],
)
def test_another_level_goes_on(name: str, to: str, tmp_path: Path) -> None:
    """Law: from another level too, a product or a rate that is one number is exact."""
    for kind in ("O0 fp32 fp32", "O3 fp16 none"):
        first, second = start(name, kind), start(name, to)
        train(first, *range(4))
        second.load_state_dict(saved(first, tmp_path))
        states = [one.optimizer.state_dict()["state"] for one in (first, second)]
        for number, values in states[0].items():
            for key in values.keys() & {"step", "mu_product", "eta", "mu"}:
                assert same(states[1][number][key], values[key])
        train(second, *range(4, 7))


def round_trip(name: str, kind: str, steps: int, folder: Path) -> None:
    session, loaded = (start(name, kind, seed) for seed in (0, 1))
    if dist.is_initialized():
        for each in (session, loaded):
            each.model = DistributedDataParallel(each.model)
    train(session, *range(steps))
    other = torch.arange(3.0)
    state = {"train": hs.fsdp.Stateful(session), "other": other}
    with assert_unchanged(session):
        dcp.save(state, checkpoint_id=folder)
    target = {"train": hs.fsdp.Stateful(loaded), "other": torch.zeros(3)}
    dcp.load(target, checkpoint_id=folder)
    assert same(target["other"], other)
    for more in ([], range(steps, steps + 4)):
        for each in (session, loaded):
            train(each, *more)
        assert same(session.state_dict(), loaded.state_dict())


of_dcp = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


@of_dcp
@pytest.mark.numeric
@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        *(("adamw", kind, 3) for kind in KINDS[1::2]),
        ("damped sgd", "O2 bf16 fp32", 3),
        *((name, "O2 bf16 fp32", 0) for name in ("adamw", "adafactor")),
    ],
)
def test_round_trip(name: str, kind: str, steps: int, tmp_path: Path) -> None:
    """Law: saved and loaded into a new session, a run goes on to the bit.

    Saved before the first step, too, which a look at the state must not change.
    """
    round_trip(name, kind, steps, tmp_path)


def test_ranks(tmp_path: Path) -> None:
    """Law: under DDP, too."""
    run_ranks(__file__, str(tmp_path))


@of_dcp
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
    for kind in ("O1 bf16 fp32", "O2 bf16 kahan"):
        round_trip("adamw", kind, 3, Path(sys.argv[1]) / kind)
    dist.destroy_process_group()

"""A session among other things that torch.distributed.checkpoint saves and loads."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import run_ranks
from session_cases import any_machine  # noqa: F401
from small_training import same
from tests.session.test_resume_optimizers import KINDS, go, start
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.testing import assert_unchanged

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def round_trip(name: str, kind: str, steps: int, folder: Path) -> None:
    session, loaded = (start(name, kind, seed) for seed in (0, 1))
    if dist.is_initialized():
        for each in (session, loaded):
            each.model = DistributedDataParallel(each.model)
    go(session, *range(steps))
    other = torch.arange(3.0)
    state = {"train": hs.sharded.Stateful(session), "other": other}
    with assert_unchanged(session):
        dcp.save(state, checkpoint_id=folder)
    target = {"train": hs.sharded.Stateful(loaded), "other": torch.zeros(3)}
    dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["other"], other)
    for more in ([], range(steps, steps + 4)):
        for each in (session, loaded):
            go(each, *more)
        assert same(session.state_dict(), loaded.state_dict())


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        *(("adamw", kind, 3) for kind in KINDS),
        *((name, "O2 bf16 fp32", 3) for name in ("damped sgd", "adafactor")),
        *((name, "O2 bf16 fp32", 0) for name in ("adamw", "damped sgd", "adafactor")),
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

"""Two processes against one: the same losses, the same weights, the same skips."""

import contextlib
import functools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from processes import group_of_one
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import halfstep as hs
from halfstep.distributed.ddp import data_parallel
from halfstep.distributed.process_group import (
    World,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    join,
)
from halfstep.errors import UserError
from halfstep.session.session import Session

LEVELS = ("O0 fp32", "O1 bf16", "O2 bf16")
RUNS = [(kind, accumulate) for kind in LEVELS for accumulate in (1, 2)]
STEPS, ROWS = 4, 16
ALONE = World(0, 1, torch.device("cpu"))


def session_of(kind: str, **more: Any) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    level, dtype = kind.split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That fp16 is slow on some processors.
        return hs.prepare(model, optimizer, level, dtype=dtype, **more)


def micro_batch(session: Session, seed: int, rows: slice) -> Tensor:
    """Run forward and backward over some rows of a batch; return the loss."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, 6, generator=generator)
    targets = inputs[:, :3] * inputs[:, 3:] + 0.5
    with session.autocast():
        out = session.model(inputs[rows])
        loss = nn.functional.mse_loss(out.float(), targets[rows])
    session.backward(loss)
    return loss.detach()


def train(kind: str, accumulate: int, world: World) -> dict[str, Any]:
    session = session_of(kind, accumulate=accumulate)
    before = {name: tensor.clone() for name, tensor in session.weights().items()}
    session.model = data_parallel(session.model, world)
    exchanged: list[int] = []
    if isinstance(session.model, nn.parallel.DistributedDataParallel):
        everyone = dist.group.WORLD
        assert everyone is not None
        session.model.register_comm_hook(
            exchanged,
            # No def: DDP reads annotations, and takes none that are text.
            lambda log, bucket: log.append(1) or allreduce_hook(everyone, bucket),
        )
    share = ROWS // world.size // accumulate
    losses = []
    for seed in range(STEPS):
        seen = torch.zeros(())
        for part in range(accumulate):
            start = (world.rank * accumulate + part) * share
            seen += micro_batch(session, seed, slice(start, start + share))
            session.step()
        losses.append(all_reduce_sum(seen).item() / world.size / accumulate)
    weights = {name: tensor.clone() for name, tensor in session.weights().items()}
    return {
        "before": before,
        "weights": weights,
        "losses": losses,
        "exchanges": len(exchanged) / STEPS,
    }


def refusal(world: World) -> str:
    wrapped = data_parallel(nn.Linear(2, 2), world)
    try:
        hs.prepare(wrapped, torch.optim.SGD(wrapped.parameters()), "O2", dtype="bf16")
    except UserError as error:
        return str(error)
    return "nothing"


def process(folder: Path) -> None:
    with join("cpu") as world:
        found: dict[str, Any] = {
            "world": (world.rank, world.size, world.is_first),
            "highest": all_reduce_max(torch.tensor([float(world.rank), 5.0])),
            "total": all_reduce_sum(torch.tensor([float(world.rank), 5.0])),
            "runs": {run: train(*run, world) for run in RUNS},
            "refusal": refusal(world),
        }
        barrier()
        if world.is_first:
            time.sleep(0.5)  # who leaves before has not waited
        torch.save(found, folder / f"{world.rank}.pt")
    assert not dist.is_initialized()
    assert (folder / "0.pt").exists()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@functools.cache
def alone(kind: str) -> dict[str, Any]:
    return train(kind, 1, ALONE)


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    gaps = [(left[name] - right[name]).float().square().sum() for name in right]
    return float(torch.stack(gaps).sum().sqrt())


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_two_processes_are_one(
    ranks: list[dict[str, Any]], run: tuple[str, int]
) -> None:
    """Law: halves of a batch, averaged, train as the whole does; ranks are alike."""
    one, two = alone(run[0]), ranks[0]["runs"][run]
    if run[0] == "O0 fp32":
        nothing = {name: torch.zeros_like(t) for name, t in one["weights"].items()}
        room, bound = 1e-6 * distance(one["weights"], nothing), 1e-6
    else:
        # A bf16 gradient is rounded by 2**-9 of itself: of the way gone, four ulps
        # are allowed for its few roundings.
        room, bound = 2.0**-6 * distance(one["weights"], one["before"]), 2.0**-6
    other = ranks[1]["runs"][run]
    torch.testing.assert_close(two["weights"], other["weights"], rtol=0, atol=0)
    assert distance(one["weights"], two["weights"]) <= room
    assert two["losses"] == pytest.approx(one["losses"], rel=bound)
    assert distance(one["weights"], one["before"]) > 0.1


def test_gradients_travel_once_a_step(ranks: list[dict[str, Any]]) -> None:
    """Law: accumulation exchanges once a step; masters, that fold, each time."""
    counts = {run: seen["exchanges"] for run, seen in ranks[0]["runs"].items()}
    # O2 fills two buckets, one for each dtype of its parameters.
    once = {(kind, n): 1.0 for kind in LEVELS[:2] for n in (1, 2)}
    assert counts == once | {("O2 bf16", 1): 2.0, ("O2 bf16", 2): 4.0}


def test_agreement(ranks: list[dict[str, Any]]) -> None:
    """Law: maxima and sums are the same on every rank; one rank leads."""
    assert [rank["world"] for rank in ranks] == [(0, 2, True), (1, 2, False)]
    assert [rank["highest"].tolist() for rank in ranks] == [[1.0, 5.0]] * 2
    assert [rank["total"].tolist() for rank in ranks] == [[1.0, 10.0]] * 2


def test_a_wrapped_model_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Law: a model that is in DDP already cannot be stored low."""
    assert ranks[0]["refusal"] == (
        "level=O2 changes the dtype of weights, and the model is already in "
        "DistributedDataParallel. Prepare the bare model, then wrap session.model."
    )


def test_one_process_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without torchrun nothing is joined, wrapped, summed or waited for."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    model, value = nn.Linear(2, 2), torch.tensor([3.0])
    with join("cpu") as world:
        assert world == ALONE
        assert world.is_first
        assert data_parallel(model, world) is model
        assert all_reduce_max(value) is value
        assert all_reduce_sum(value) is value
        barrier()
    assert value.tolist() == [3.0]
    assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_leaving(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Law: a process waits for all, then leaves; after an error it leaves at once."""
    waits: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: waits.append("for all"))
    monkeypatch.setattr(time, "sleep", lambda _: waits.append("for threads"))
    message = "inside"
    with contextlib.suppress(RuntimeError), group_of_one():
        assert dist.is_initialized()
        if fails:
            raise RuntimeError(message)
    assert waits == ([] if fails else ["for all", "for threads"])
    assert not dist.is_initialized()


if __name__ == "__main__":
    process(Path(sys.argv[1]))

"""Replays, diagnoses and probes in two processes that torchrun starts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planted_faults import FAULTS, Run
from ranks import PATIENCE, saw, start
from tests.diagnostics.test_probe import NAN, X, net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.distributed import process_group
from halfstep.errors import UserError

DDP = ("cnn cast eager", "bert amplified eager")
SHARDED = ("bert overflow eager", "bert root eager")


def alone(name: str) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """Return a case in which one process alone has a fault, and runs it again."""

    def case(group: dist.ProcessGroup) -> dict[str, Any]:
        fault = FAULTS[name]
        run = Run(**fault.run)
        model = DistributedDataParallel(run.model, process_group=group)
        right, said = None, ""
        if dist.get_rank() == 1:
            fault.plant(run)
            bad = hs.find_nonfinite(model, lambda: run.step(model), scale=run.scale)
            right = fault.judge(bad)
            said = str(bad)
        return {"right": right, "said": said}

    return case


def alone_until_done(case: str) -> None:
    """Let the other process wait, and take part in nothing, until the second is here.

    By the store: what the second exchanges before would otherwise be answered.
    """
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set(f"done {case}", "")
    store.wait([f"done {case}"], 2 * PATIENCE)


def in_first_step(group: dist.ProcessGroup) -> dict[str, Any]:
    """One process asks after the first backward pass: DDP then rebuilds its buckets."""
    run = Run("mlp")
    model = DistributedDataParallel(run.model, process_group=group)
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("hook"))
    run.step(model).backward()
    said = ""
    if dist.get_rank() == 1:
        run.batch["x"] = run.batch["x"] * math.nan
        said = str(hs.find_nonfinite(model, lambda: run.step(model)))
    alone_until_done("in first step")
    seen = len(calls)
    run.step(model).backward()  # both go on, and meet
    dist.barrier(group)
    return {"said": said, "hooks": seen, "forward": "forward" in vars(model)}


def before_first_step(group: dist.ProcessGroup) -> dict[str, Any]:
    """One process asks before a session has met its DDP: masters are then shared."""
    torch.manual_seed(0)
    bare = torch.nn.Linear(4, 2)
    session = hs.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1), "O2")
    session.model = DistributedDataParallel(bare, process_group=group)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with session.autocast():
            return session.model(x).float().square().mean()

    said = ""
    if dist.get_rank() == 1:
        x = torch.full((3, 4), math.nan)
        said = str(hs.find_nonfinite(session.model, lambda: loss(x)))
    alone_until_done("before first step")
    session.backward(loss(torch.ones(3, 4)))
    skipped = session.step().skipped
    return {"said": said, "skipped": skipped}


def healthy(group: dist.ProcessGroup) -> dict[str, Any]:
    """Both ask, for both saw NaN in the gradients that DDP averaged."""
    run = Run("mlp")
    model = DistributedDataParallel(run.model, process_group=group)
    if dist.get_rank() == 1:
        run.batch["x"] = run.batch["x"] * math.nan
    run.step(model).backward()
    bad = hs.find_nonfinite(model, lambda: run.step(model), failed=True)
    assert bad
    return {"cause": bad.cause, "said": str(bad), "reproduced": bad.reproduced}


def diagnosed(group: dist.ProcessGroup) -> dict[str, Any]:
    """Both diagnose their loop; one has a batch of NaN."""
    run = Run("mlp", dtype=None)
    model = DistributedDataParallel(run.model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank() == 1:
        run.batch["x"] = run.batch["x"] * math.nan

    def step(batch: int) -> None:
        del batch
        optimizer.zero_grad()
        run.step(model).backward()
        optimizer.step()

    found = hs.diagnose(step, model=model, optimizer=optimizer, batches=range(9))
    bad = found.numerics.bad_op
    return {"cause": bad and bad.cause, "losses": found.numerics.losses}


def beside(group: dist.ProcessGroup) -> dict[str, Any]:
    """The model is given, and its wrapper is what runs."""
    run = Run("mlp")
    model = DistributedDataParallel(run.model, process_group=group)
    with pytest.raises(UserError) as caught:
        hs.find_nonfinite(run.model, lambda: run.step(model))
    return {"said": str(caught.value)}


def together(name: str) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """Return a case in which a model in shards is run again, by all."""

    def case(group: dist.ProcessGroup) -> dict[str, Any]:
        del group
        fault = FAULTS[name]
        run = Run(**fault.run)
        if dist.get_rank() == 1 or "overflow" in name:
            fault.plant(run)
        for layer in run.model.encoder.layers:
            fully_shard(layer)
        model = fully_shard(run.model)
        bad = hs.find_nonfinite(model, lambda: run.step(model), scale=run.scale)
        first = process_group.first_not_none(bad or None)
        left = sum(p.grad is not None for p in model.parameters())
        return {"right": fault.judge(first), "left": left, "said": str(bad)}

    return case


CASES = {f"alone {name}": alone(name) for name in DDP}
CASES |= {"in first step": in_first_step, "before first step": before_first_step}
CASES |= {"healthy": healthy, "diagnosed": diagnosed, "beside": beside}
CASES |= {f"together {name}": together(name) for name in SHARDED}


def seen_by_ranks(case: str) -> list[dict[str, Any]]:
    return saw(start(2, ("tests.diagnostics.test_ranks",)), case)


@pytest.mark.parametrize("name", DDP)
def test_one_process_asks_alone(name: str) -> None:
    """Law: under DDP a replay exchanges nothing: no other process need take part."""
    ranks = seen_by_ranks(f"alone {name}")
    assert ranks[0]["right"] is None
    assert ranks[1]["right"] == (True, True, True), ranks[1]["said"]


def test_one_asks_alone_in_the_first_step() -> None:
    """Law: nothing is exchanged then either, and training goes on; hooks of DDP run."""
    ranks = seen_by_ranks("in first step")
    assert "argument 'x' of the model holds NaN" in ranks[1]["said"]
    assert [rank["hooks"] for rank in ranks] == [1, 2]
    assert not any(rank["forward"] for rank in ranks)


def test_one_asks_alone_before_the_first_step() -> None:
    """Law: a session shares its masters in a step, not in a replay."""
    ranks = seen_by_ranks("before first step")
    assert "holds NaN" in ranks[1]["said"]
    assert not any(rank["skipped"] for rank in ranks)


def test_a_healthy_process_blames_no_hardware() -> None:
    """Law: where processes average gradients, one that is healthy points to others."""
    first, second = seen_by_ranks("healthy")
    assert second["cause"] == "data"
    assert (first["cause"], first["reproduced"]) == ("another process", False)
    assert "2 processes" in first["said"]
    assert "hardware" not in first["said"].partition("If")[0]


def test_a_wrapper_beside_the_model() -> None:
    """Law: a DDP that find_nonfinite was not given is refused by name."""
    for rank in seen_by_ranks("beside"):
        assert rank["said"].startswith(
            "step() of find_nonfinite runs a DistributedData"
        )
        assert rank["said"].endswith("give that wrapper as the model.")


def test_a_diagnosis_on_each_process() -> None:
    """Law: both go on and end; the one with the fault tells it, the other points there.

    The weights are spoilt for both by the first step.
    """
    first, second = seen_by_ranks("diagnosed")
    assert (first["cause"], second["cause"]) == ("another process", "data")
    assert first["losses"] == tuple(range(2, 10))
    assert second["losses"] == tuple(range(1, 10))


@pytest.mark.parametrize("name", SHARDED)
def test_all_ask_together(name: str) -> None:
    """Law: under FSDP2 all replay as often, whoever has the fault, and are told."""
    for rank in seen_by_ranks(f"together {name}"):
        assert rank["right"] == (True, True, True), rank["said"]
        assert rank["left"] == 0


# A probe under DDP and FSDP2, over two ranks.


WRAPPED = (("ddp", "flags"), ("fsdp", "full"))


def _wrapped(kind: str, group: dist.ProcessGroup) -> nn.Module:
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _case(kind: str, mode: Any) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """Return a program: a clean step, one that is bad on the second rank, a clean one.

    Each rank has its own part of the batch.
    """

    def case(group: dist.ProcessGroup) -> dict[str, Any]:
        model = _wrapped(kind, group)
        inner = model.module if kind == "ddp" else model
        found = []
        with hs.Probe(model, mode) as probe:
            for number in range(3):
                bad = number == 1 and group.rank() == 1
                inner[1].broken.backward_value = NAN if bad else None
                model.zero_grad()
                model(X[group.rank() :: 2]).square().sum().backward()
                probe.step()
                found.append(probe.non_finite)
        return {"found": found}

    return case


CASES |= {f"{kind} {mode}": _case(kind, mode) for kind, mode in WRAPPED}


@pytest.mark.parametrize(("kind", "mode"), WRAPPED)
def test_each_rank_sees_its_own(kind: str, mode: str) -> None:
    """Law: what broke on one rank is flagged there; gradients, once averaged, on both.

    They are looked at when DDP and FSDP2 have finished them.
    """
    for rank, seen in enumerate(seen_by_ranks(f"{kind} {mode}")):
        clean, bad, after = seen["found"]
        assert clean == after == ()
        assert ("1.first:grad" in bad) == (rank == 1)
        assert "0.weight:grad" in bad
        assert not [name for name in bad if name.endswith(":output")]

"""`GradScaler` over ranks: they skip the same steps, and end with the same bits."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    FIRST,
    FOUR,
    INTERVAL,
    STEPS,
    Plant,
    agreed,
    average,
    batch,
    cases,
    counted,
    held,
    net,
    plants,
    saw,
    scales,
    spoil,
    start,
)
from small_training import same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.scaling import LossScaleCollapse

Make = Any
Group = dist.ProcessGroup

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
FUSED = functools.partial(ADAM, fused=True)
FUSED_SGD = functools.partial(SGD, fused=True)
OPTIMIZERS: dict[str, tuple[Make, ...]] = {
    "sgd": (SGD,),
    "adamw": (ADAM,),
    "fused adamw": (FUSED,),
    "fused sgd": (FUSED_SGD,),
    "two": (SGD, ADAM),
    "two fused": (FUSED_SGD, FUSED),
}
REPLICAS: list[tuple[str, float | None, float]]
REPLICAS = [(kind, None, FIRST) for kind in OPTIMIZERS]
REPLICAS += [
    (kind, 0.1, FIRST) for kind in ("sgd", "fused adamw", "fused sgd", "two fused")
]
# A scale that is no power of two, which kernels divide by.
REPLICAS += [(kind, None, 1000.0) for kind in ("fused adamw", "fused sgd")]
"""Optimizers, largest norm, first scale."""
DDP = (False, True)
"""Whether under DDP."""
IDLE = ("sgd", "adamw", "fused adamw", "fused sgd")


def scaler_of(**more: Any) -> hs.GradScaler:
    settings: dict[str, Any] = {"init_scale": FIRST, "growth_interval": INTERVAL}
    return hs.GradScaler("cpu", **(settings | more))


def parts_of(model: nn.Module, makes: tuple[Make, ...]) -> list[Any]:
    params = list(model.parameters())
    return [params] if len(makes) == 1 else [params[:2], params[2:]]


def finish(scaler: hs.GradScaler, optimizers: Iterable[Any], clip: float | None) -> int:
    """Unscale, clip, step and update; return how many collectives that took."""
    with counted() as calls:
        for optimizer in optimizers:
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
            scaler.step(optimizer)
        scaler.update()
    return len(calls)


def replicas(
    group: Group, kind: str, clip: float | None, first: float
) -> dict[str, Any]:
    """Train replicas whose gradients are averaged by hand, then spoilt on one rank."""
    plan, makes = plants(REPLICAS.index((kind, clip, first))), OPTIMIZERS[kind]
    calls, skipped = [], []

    def run(scaler: hs.GradScaler | None) -> dict[str, Any]:
        model = net()
        params, parts = list(model.parameters()), parts_of(model, makes)
        optimizers = [make(part) for make, part in zip(makes, parts, strict=True)]
        for step in range(STEPS):
            model.zero_grad()
            loss = model(batch(step)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            average((p.grad for p in params), group)
            if scaler is not None:
                spoil_one_of(params, plan, step)
                calls.append(finish(scaler, optimizers, clip))
                skipped.append(scaler.last_step.skipped)
                continue
            spoilt = params[plan[step].param] if step in plan else None
            for part, optimizer in zip(parts, optimizers, strict=True):
                if clip is not None:
                    nn.utils.clip_grad_norm_(part, clip)
                if not any(param is spoilt for param in part):
                    optimizer.step()
        return held(model, *optimizers)

    scaler = scaler_of(process_group=group, init_scale=first)
    return run(scaler) | {
        "plain": run(None),
        "scaler": scaler.state_dict(),
        "scale": scaler.get_scale(),
        "skipped": skipped,
        "bad": list(plan),
        "calls": calls,
    }


def spoil_one_of(params: list[Any], plan: dict[int, Plant], step: int) -> None:
    for index, param in enumerate(params):
        spoil([plan[step]] if step in plan else [], index, param.grad)


def idle(group: Group, kind: str) -> dict[str, Any]:
    """Train parameters of each rank's own; in turn one rank has no gradient."""
    plan = plants(13)

    def rests(step: int) -> bool:
        # Who has a plant must work.
        turn = (plan[step].rank + 1 if step in plan else step) % dist.get_world_size()
        return turn == dist.get_rank()

    def run(scaler: hs.GradScaler | None) -> dict[str, Any]:
        model = net()
        params = list(model.parameters())
        optimizer = OPTIMIZERS[kind][0](params)
        skipped, trail, calls = [], [], []
        for step in range(STEPS):
            model.zero_grad()
            inputs = batch(step).requires_grad_()
            # Ranks differ in how large their gradients are.
            out = inputs if rests(step) else model(inputs) * 4.0 ** dist.get_rank()
            loss = out.square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                if step not in plan:
                    optimizer.step()
                continue
            spoil_one_of(params, plan, step)
            calls.append(finish(scaler, [optimizer], None))
            skipped.append(scaler.last_step.skipped)
            trail.append(scaler.get_scale())
        more = {"skipped": skipped, "trail": trail, "calls": calls}
        return held(model, optimizer) | more

    seen = run(scaler_of(process_group=group))
    return seen | {"plain": run(None), "bad": list(plan)}


def collapse(group: Group, ddp: bool) -> dict[str, Any]:
    """Overflow on the last rank from step 2 on; take down when that raises."""
    more: dict[str, Any] = {} if ddp else {"process_group": group}
    scaler = scaler_of(max_consecutive_skips=3, **more)
    bare = net()
    model = DistributedDataParallel(bare, process_group=group) if ddp else bare
    optimizer = SGD(bare.named_parameters())
    last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(STEPS):
        model.zero_grad()
        factor = float("inf") if last and step >= 2 else 1.0
        scaler.scale(model(batch(step)).square().mean() * factor).backward()
        try:
            finish(scaler, [optimizer], None)
        except LossScaleCollapse as error:
            blamed = bool(error.inf_in or error.nan_in)
            return {"step": step, "blamed": blamed, "history": list(error.history)}
    return {}


CASES: dict[str, Callable[[Group], dict[str, Any]]] = {
    **cases(replicas, *REPLICAS),
    **cases(idle, *IDLE),
    **cases(collapse, *DDP),
}


@pytest.fixture(scope="module", params=[2, FOUR])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param)


@pytest.mark.parametrize(("kind", "clip", "first"), REPLICAS)
def test_replicas(
    ranks: list[dict[str, Any]], kind: str, clip: float | None, first: float
) -> None:
    """Law: inf on one rank skips that optimizer on all, as if the step never was."""
    seen = agreed(ranks, f"replicas {(kind, clip, first)}")
    plain = seen["plain"]
    # Gradients that are divided by a scale that is no power of two are rounded.
    room = 0.0 if first == FIRST else 1e-5
    ours = {key: seen[key] for key in plain}
    torch.testing.assert_close(ours, plain, rtol=room, atol=room)
    assert [step for step, bad in enumerate(seen["skipped"]) if bad] == seen["bad"]
    assert seen["scale"] == scales(seen["bad"], first)[-1]
    assert seen["calls"] == [len(OPTIMIZERS[kind])] * STEPS


@pytest.mark.parametrize("kind", IDLE)
def test_a_rank_without_gradients(ranks: list[dict[str, Any]], kind: str) -> None:
    """Law: who has no gradient comes along; the others step or skip by the flag."""
    agreed(ranks, f"idle {kind}", "skipped", "trail", "calls", "bad")
    for seen in saw(ranks, f"idle {kind}"):
        assert same(seen["weights"], seen["plain"]["weights"])
        # Kernels that skipped the first of all steps leave state of zeros behind.
        assert same(seen["state"], seen["plain"]["state"])
        assert [step for step, bad in enumerate(seen["skipped"]) if bad] == seen["bad"]
        assert seen["trail"] == scales(seen["bad"])[1:]
        assert seen["calls"] == [1] * STEPS


@pytest.mark.parametrize("ddp", DDP)
def test_collapse(ranks: list[dict[str, Any]], ddp: bool) -> None:
    """Law: a run that is lost ends on every rank, at the same step."""
    seen = agreed(ranks, f"collapse {ddp}", "step", "history")
    assert seen["step"] == 4
    blamed = [rank["blamed"] for rank in saw(ranks, f"collapse {ddp}")]
    assert blamed == [ddp] * (len(ranks) - 1) + [True]

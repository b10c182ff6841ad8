"""Sessions over ranks: they skip the same steps, and end with the same bits."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
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
    scales,
    spoil,
    start,
    watch,
)
from small_training import same
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.scaling import ScaleRule

Group = dist.ProcessGroup

RULE = ScaleRule(init_scale=FIRST, growth_interval=INTERVAL)
HOWS = ("ddp", "late")
KINDS = ("O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16")
RUNS = list(itertools.product(KINDS, HOWS, (None, 0.1)))
FLUSHED = ("O0 fp32", "O1 fp16", "O2 bf16")


class Trainer:
    """A session on one rank, whose gradients may be spoilt.

    Args:
        group: All ranks.
        kind: Level and dtype.
        how: Who averages gradients: "ddp"; or by hand "late", before each step, or
            "hooks", in each backward pass; or nobody: each rank trains its "own". In
            all but the first ranks agree by their group.
        more: For `prepare`.
    """

    def __init__(self, group: Group, kind: str, how: str, **more: Any) -> None:
        level, dtype = kind.split()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        agree = None if how == "ddp" else group
        more = {"loss_scale": RULE, "process_group": agree} | more
        self.session = hs.prepare(model, optimizer, level, dtype=dtype, **more)
        self.group, self.how = group, how
        self.params = list(model.parameters())
        self.box: list[Plant] = []
        """What to plant, on its rank: "late" after averaging, otherwise in the pass."""
        if how == "ddp":
            self.session.model = DistributedDataParallel(model, process_group=group)
        if how != "late":
            watch(self.params, self.box, group if how == "hooks" else None)

    def loss(self, step: int) -> Tensor:
        with self.session.autocast():
            out: Tensor = self.session.model(batch(step))
            return out.float().square().mean()

    def step(self) -> tuple[Any, int]:
        if self.how == "late":
            average((param.grad for param in self.params), self.group)
            for index, param in enumerate(self.params):
                spoil(self.box, index, param.grad)
        with counted() as calls:
            report = self.session.step()
        return report, len(calls)

    def seen(self) -> dict[str, Any]:
        return held(self.session.model, self.session.optimizer) | {
            "masters": self.session.weights(),
            "scale": self.session.state_dict()["scaler"]["scale"],
            "counts": [self.session.steps_applied, self.session.steps_skipped],
        }


def train(group: Group, kind: str, how: str, clip: float | None) -> dict[str, Any]:
    """Train with plants; and again without those steps, at the same scales."""
    plan = plants(19)
    spoilt = Trainer(group, kind, how, clip_grad_norm=clip)
    skipped, calls = [], []
    for step in range(STEPS):
        spoilt.box[:] = [plan[step]] if step in plan else []
        spoilt.session.backward(spoilt.loss(step))
        report, count = spoilt.step()
        skipped.append(report.skipped)
        calls.append(count)
    without = Trainer(group, kind, how, clip_grad_norm=clip)
    by_hand = scales(plan)
    for step in range(STEPS):
        state = without.session.scaler.state
        scale = torch.tensor(by_hand[step])
        without.session.scaler.state = replace(state, scale=scale)
        if step in plan:
            # DDP regroups gradients after its first pass: sums of 4 then round anew.
            without.loss(step).backward()  # type: ignore[no-untyped-call]
            without.session.model.zero_grad()
        else:
            without.session.backward(without.loss(step))
            without.step()
    more = {"without": without.seen(), "skipped": skipped, "calls": calls}
    return spoilt.seen() | more | {"bad": list(plan)}


def flushed(group: Group, kind: str) -> dict[str, Any]:
    half, whole = (Trainer(group, kind, "ddp", accumulate=n) for n in (4, 2))
    for step in range(STEPS):
        for micro in range(2):
            for trainer in (half, whole):
                trainer.session.backward(trainer.loss(2 * step + micro))
                trainer.step()
        half.session.flush()
    return half.seen() | {"whole": whole.seen()}


CASES: dict[str, Callable[[Group], dict[str, Any]]] = {
    **cases(train, *RUNS),
    **cases(flushed, *FLUSHED),
}


@pytest.fixture(scope="module", params=[2, FOUR])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param)


def places(flags: Iterable[bool]) -> list[int]:
    return [step for step, flag in enumerate(flags) if flag]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_sessions(ranks: list[dict[str, Any]], run: tuple[str, str, float]) -> None:
    """Law: inf on one rank skips the step on all, as if it never was."""
    seen = agreed(ranks, f"train {run}")
    for key in ("weights", "masters", "state"):
        assert same(seen[key], seen["without"][key])
    assert places(seen["skipped"]) == seen["bad"]
    assert seen["counts"] == [STEPS - 3, 3]
    assert seen["scale"] == scales(seen["bad"])[-1]
    assert seen["calls"] == [0 if run[1] == "ddp" else 1] * STEPS


@pytest.mark.parametrize("kind", FLUSHED)
def test_flush(ranks: list[dict[str, Any]], kind: str) -> None:
    """Law: an unfinished window is averaged over ranks when it is flushed."""
    seen = agreed(ranks, f"flushed {kind}")
    assert seen["counts"] == seen["whole"]["counts"] == [STEPS, 0]
    torch.testing.assert_close(seen["masters"], seen["whole"]["masters"])

"""fp16 on its way between ranks: no overflow that was not there, and no skip alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import FOUR, Plant, agreed, cases, start
from tests.session.test_ddp_sync import FILES, wrap
from tests.session.test_session_ranks import RULE, Trainer
from torch import Tensor, nn

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Callable

Group = dist.ProcessGroup

STEPS = 12
KINDS = ("O1 fp16", "O2 fp16", "O3 bf16", "O2 bf16")
WINDOWS = [(1, 0.1, False), (2, None, True), (2, 0.1, False), (4, 0.1, True)]
FUZZ = [(kind, *window) for kind in KINDS for window in WINDOWS]


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, slopes: Tensor) -> Tensor:
        return self.weight * slopes


def near(group: Group, accumulate: int) -> dict[str, Any]:
    model = Slopes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = replace(RULE, init_scale=1.0)
    session = hs.prepare(
        model, optimizer, "O2", dtype="fp16", accumulate=accumulate, loss_scale=rule
    )
    used: list[Tensor] = []
    (param,) = session.optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: used.append(param.grad.clone()))
    wrap(session, group)
    signs = torch.tensor([1.0, -1.0, 1.0 if dist.get_rank() % 2 else -1.0])
    for _ in range(accumulate):
        with session.autocast():
            out = session.model((60000 * signs).half())
        session.backward(out.float().sum() * accumulate)
        report = session.step()
    return {"used": used, "skipped": report.skipped}


def fuzz(
    group: Group, kind: str, accumulate: int, clip: float | None, drop: bool
) -> dict[str, Any]:
    draw = random.Random(f"{kind} {accumulate} {clip}")  # noqa: S311 -- no secret
    more = {"on_overflow": "drop_microbatch"} if drop else {}
    trainer = Trainer(
        group, kind, "ddp", accumulate=accumulate, clip_grad_norm=clip, **more
    )
    skipped, planted, dropped = [], [], []
    for step in range(STEPS):
        planted.append(draw.random() < 0.4)
        where = draw.randrange(accumulate)
        plant = Plant(
            draw.randrange(dist.get_world_size()),
            draw.randrange(4),
            draw.choice((float("inf"), -float("inf"), float("nan"))),
        )
        for micro in range(accumulate):
            trainer.box[:] = [plant] if planted[-1] and micro == where else []
            trainer.session.backward(trainer.loss(accumulate * step + micro))
            report = trainer.session.step()
        skipped.append(report.skipped)
        dropped.append(int(report.microbatches_dropped))
    more = {"skipped": skipped, "planted": planted, "dropped": dropped}
    return trainer.seen() | more


CASES: dict[str, Callable[[Group], dict[str, Any]]] = {
    **cases(near, 1, 3, 4),
    **cases(fuzz, *FUZZ),
}


@pytest.fixture(scope="module", params=[2, FOUR])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param, FILES)


@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_near_the_largest_number(seen: list[dict[str, Any]], accumulate: int) -> None:
    """Law: neither a mean over ranks nor a sum of micro-batches overflows on the way.

    60000 is 1875 times 32: it, its parts and their sums come out whole.
    """
    found = agreed(seen, f"near {accumulate}")
    assert not found["skipped"]
    expected = 60000.0 * accumulate
    # With 3, what travels is divided by 4: 45000 lies halfway between two numbers.
    (used,) = found["used"]
    step = 32 * 4 if accumulate == 3 else 0
    assert abs(used[0].item() - expected) <= step
    assert abs(used[1].item() + expected) <= step
    assert used[2].item() == 0


@pytest.mark.parametrize("run", FUZZ, ids=str)
def test_no_rank_skips_alone(seen: list[dict[str, Any]], run: Any) -> None:
    """Law: what is not finite on one rank is left out on all; scales stay equal."""
    found = agreed(seen, f"fuzz {run}")
    assert any(found["planted"])
    if run[3]:
        assert found["dropped"] == [int(planted) for planted in found["planted"]]
        assert not any(found["skipped"])
    else:
        assert found["skipped"] == found["planted"]

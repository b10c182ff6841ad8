"""First bad operation over several micro-batches: each alone, and their sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from required import required
from torch import Tensor, nn

import halfstep as hs

if TYPE_CHECKING:
    from halfstep.diagnostics.replay.search import Step

PARTS = 4


class Half(nn.Module):
    """Two layers in fp16; the gradient of the second is what the loss multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4).half()
        self.outer = nn.Linear(4, 1, bias=False).half()

    def forward(self, x: Tensor) -> Tensor:
        """Return one number a row."""
        # A row of ones, whatever comes in, so that slopes are known.
        return self.outer(self.inner(x) * 0 + 1)  # type: ignore[no-any-return]


X = torch.ones(1, 4).half()


def steps(model: nn.Module, factor: float, parts: int = PARTS) -> list[Step]:
    """Return micro-batches whose gradients are `factor` at each place."""
    return [lambda: (model(X) * factor).float().sum() for _ in range(parts)]


def added_up(model: nn.Module, given: list[Step], scale: float) -> bool:
    """Say whether torch's own accumulation gives finite gradients."""
    for step in given:
        (step() * scale).backward()  # type: ignore[no-untyped-call]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return all(bool(grad.isfinite().all()) for grad in found)


def test_a_sum_that_overflows_is_no_fault_of_hardware() -> None:
    """Law: where each micro-batch is finite and their fp16 sum is not, that is told."""
    model = Half()
    given = steps(model, 3e4)
    assert added_up(model, given[:1], 1.0)
    assert not added_up(model, given, 1.0)
    bad = required(hs.find_nonfinite(model, given, failed=True))
    assert (bad.cause, bad.phase) == ("backward range", "backward")
    assert (bad.module, bad.kind, bad.op) == ("outer", "Linear", "add")
    assert (bad.dtype, bad.inputs, bad.nonfinite_kind) == ("float16", 3e4, "inf")
    assert bad.reproduced
    assert not bad.normal
    assert "gradients of 4 micro-batches are finite, up to 3.0e+04" in bad.evidence
    assert "in 1 of 3 parameters (outer.weight first)" in bad.evidence
    assert "prepare(level='O2', accumulate=4)" in bad.advice
    assert "divide each loss by 4" in bad.advice


def test_its_remedies_cure_it() -> None:
    """Law: a sum in fp32, a loss divided by the micro-batches: each makes it finite."""
    model = Half()
    assert hs.find_nonfinite(model, steps(model, 3e4), summed_in=torch.float32) is None
    assert hs.find_nonfinite(model, steps(model, 3e4 / PARTS)) is None
    assert added_up(model, steps(model, 3e4 / PARTS), 1.0)


@pytest.mark.filterwarnings("ignore:level O. with dtype fp16")
@pytest.mark.parametrize(("level", "skipped"), [("O2", False), ("O3", True)])
def test_the_level_that_is_advised_adds_up_in_fp32(
    level: str, *, skipped: bool
) -> None:
    """Law: at O2 the same gradients make a step, where at O3 they make none."""
    model = Half().float()
    session = hs.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-9),
        level,
        dtype="fp16",
        loss_scale=1.0,
        accumulate=PARTS,
    )
    for _ in range(PARTS):
        with session.autocast():
            # The session divides by the micro-batches.
            loss = (session.model(X) * (3e4 * PARTS)).float().sum()
        session.backward(loss)
        report = session.step()
    assert report.skipped == skipped


def test_a_smaller_scale_cures_a_sum() -> None:
    """Law: a sum that is finite at scale 1 is told to be normal."""
    model = Half()
    given = steps(model, 30.0)
    assert added_up(model, given, 1.0)
    assert not added_up(model, given, 2.0**10)
    bad = required(hs.find_nonfinite(model, given, scale=2.0**10, failed=True))
    assert (bad.cause, bad.normal) == ("backward range", True)
    assert "at loss scale 1024; at scale 1 the sum is finite" in bad.evidence
    assert added_up(model, given, 2.0**9)


def test_the_micro_batch_is_named() -> None:
    """Law: of several micro-batches, the one that is bad by itself is named."""
    model = Half()
    given = steps(model, 1.0)
    spoilt = X * float("nan")
    given[2] = lambda: model(spoilt).sum()
    bad = required(hs.find_nonfinite(model, given))
    assert (bad.module, bad.cause) == ("inner", "data")
    assert bad.evidence.endswith("(micro-batch 3 of 4)")
    assert hs.find_nonfinite(model, steps(model, 1.0)) is None


def test_micro_batches_draw_on_from_each_other() -> None:
    """Law: each begins with the random numbers that the one before it has left."""
    model, drawn = Half(), []

    def step() -> Tensor:
        drawn.append(float(torch.rand(())))
        return model(X).float().sum()

    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert hs.find_nonfinite(model, [step, step], generator_state=state) is None
    assert drawn == torch.rand(2).tolist()


def test_hardware_is_named_once_the_sum_was_looked_at() -> None:
    """Law: for one micro-batch the sum is a suspect; for all of them it is none."""
    model = Half()
    alone = hs.find_nonfinite(model, steps(model, 1.0, 1), failed=True)
    together = hs.find_nonfinite(model, steps(model, 1.0), failed=True)
    assert alone is not None
    assert together is not None
    assert alone.cause == together.cause == "hardware"
    assert "give a list with one step for each" in alone.advice
    assert "micro-batches" not in together.advice


def test_sparse_gradients_are_added_up() -> None:
    """Law: rows of an embedding that meet in the sum are added."""
    table = nn.Embedding(5, 2, sparse=True).bfloat16()
    ids = torch.tensor([1, 3])

    def step() -> Tensor:
        return (table(ids).float() * 1.5e38).sum()  # type: ignore[no-any-return]

    assert hs.find_nonfinite(table, [step] * 2) is None
    bad = required(hs.find_nonfinite(table, [step] * 3))
    assert (bad.module, bad.op) == ("model", "add")


@pytest.mark.parametrize(
    ("norm", "factor", "runs"),
    [
        (nn.BatchNorm1d, 1.0, 3),
        (nn.BatchNorm1d, math.nan, 1),
        (nn.SyncBatchNorm, 1.0, 9),
        (nn.SyncBatchNorm, math.nan, 9),
    ],
)
def test_all_processes_run_as_many(
    norm: type[nn.Module], factor: float, runs: int
) -> None:
    """Law: where norms exchange, no finding of one process spares it a pass."""
    model, count = nn.Sequential(nn.Linear(4, 4), norm(4)), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        return model(torch.eye(4)).square().sum() * factor  # type: ignore[no-any-return]

    bad = hs.find_nonfinite(model, [step] * 3, scale=2.0)
    assert ((bad is None), count) == (factor == 1, runs)


def test_a_sum_beyond_float32_is_not_cured_by_bfloat16() -> None:
    """Law: bfloat16 reaches no further than float32, and is no remedy there."""
    model = nn.Linear(1, 1, bias=False)
    bad = required(
        hs.find_nonfinite(model, [lambda: 3e38 * model(torch.ones(1, 1)).sum()] * 2)
    )
    assert (bad.dtype, bad.advice) == ("float32", "Divide each loss by 2.")

"""A check before training: overflow, scales, gradients and verdicts, planted."""

import copy
import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from checked_nets import LOUD, Net, batch, loss
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.diagnostics.preflight import CheckReport
from halfstep.reporting.finding import Finding

LOW = [(level, dtype) for level in ("O1", "O2", "O3") for dtype in ("bf16", "fp16")]


def adamw(model: nn.Module, eps: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), eps=eps)


def checked(model: nn.Module, level: str, dtype: str, **more: Any) -> CheckReport:
    """Check without timing, which differs from machine to machine.

    Its optimizer has an epsilon that fp16 holds.
    """
    held = adamw(model, 1e-4)
    given = {"loss_fn": loss, "batch": batch(), "steps": 0, "optimizer": held} | more
    return hs.check(model, level=level, dtype=dtype, **given)


@functools.cache
def healthy(level: str, dtype: str) -> tuple[CheckReport, Tensor]:
    """Return the report on a sound network, and the random numbers it began with."""
    torch.manual_seed(0)
    model, state = Net(), torch.get_rng_state()
    return checked(model, level, dtype), state


def rules_of(report: CheckReport) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize(("level", "dtype"), LOW)
def test_a_healthy_network(level: str, dtype: str) -> None:
    """Law: nothing is found in a network that has nothing, at any level and format."""
    report, _ = healthy(level, dtype)
    found = [str(finding) for finding in report.findings if finding.rule != "caution"]
    assert not found
    assert report.verdict == "good"
    assert report.good
    facts = report.facts
    assert facts.gradients is not None
    assert facts.gradients.cosine > 0.99
    error = facts.loss_error
    assert error is not None
    assert abs(error) < 4 * facts.format.epsilon


def test_fp32_is_itself() -> None:
    """Law: of O0 there is nothing to say but that it can begin, if it is finite."""
    report = checked(Net(), "O0", "auto")
    assert report.verdict == (
        "nothing to compare: O0 is fp32 itself, and finite (level O0 was asked for)"
    )
    assert report.good
    assert not report.findings
    broken = checked(Net(), "O0", "auto", loss_fn=lambda m, b: loss(m, b) * math.inf)
    assert broken.verdict.startswith("fails: loss: loss ")
    assert not broken.good


@pytest.mark.parametrize(("level", "dtype"), [("O0", "auto"), ("O2", "fp16")])
def test_a_loss_without_weights(level: str, dtype: str) -> None:
    """Law: a loss whose gradients are all zero is found out, at every level."""

    def constant(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) * 0).sum()

    report = checked(Net(), level, dtype, loss_fn=constant)
    assert report.verdict == (
        "fails: gradients: no parameter gets a gradient other than zero, "
        "not even in fp32"
    )
    assert rules_of(report) == {"no gradient"}
    assert not report.good


@pytest.mark.parametrize("steps", [0, 1])
def test_weights_that_will_be_nan(steps: int) -> None:
    """Law: what a caution says of NaN is an error, and no verdict is good beside it."""
    model = Net()
    bad = adamw(model, 1e-8)
    report = checked(model, "O3", "fp16", optimizer=bad, steps=steps)
    assert report.verdict == (
        "fails: AdamW, lr=0.001: eps=1e-08 rounds to 0 in fp16, in which level O3 "
        "keeps the optimizer's state: weights will become NaN"
    )
    worst = report.findings[0]
    assert (worst.severity, worst.rule) == ("error", "caution")
    assert worst.where == "AdamW, lr=0.001"
    assert worst.advice == "Use eps=6.1e-05, or level O2."
    assert sum("eps=1e-08" in str(one) for one in report.findings) == 1
    good = adamw(model, 1e-4)
    assert checked(model, "O3", "fp16", optimizer=good).verdict == "good"
    assert checked(model, "O2", "fp16", optimizer=bad).verdict == "good"
    fused = torch.optim.AdamW(model.parameters(), fused=True)  # divides in fp32
    assert checked(model, "O3", "fp16", optimizer=fused).verdict == "good"


def share_lost(model: nn.Module, rate: float, steps: int) -> float:
    """Return which share of weights one more step of plain SGD in bf16 leaves alone."""
    twin = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.SGD(twin.parameters(), lr=rate)
    x, y = (one.bfloat16() for one in batch())
    for _ in range(steps + 1):
        before = [p.detach().clone() for p in twin.parameters()]
        optimizer.zero_grad()
        functional.mse_loss(twin(x), y).backward()
        optimizer.step()
    rows = [
        ((p == old) & (p.grad != 0)).sum() / (p.grad != 0).sum()
        for p, old in zip(twin.parameters(), before, strict=True)
        if p.grad is not None
    ]
    return float(rows[0])


@pytest.mark.parametrize(
    ("level", "master"), [("O3", "fp32"), ("O2", "none"), ("O2", "split")]
)
def test_swamped_updates(level: str, master: str) -> None:
    """Law: updates that bf16 rounds away are counted, unless masters keep them."""
    model = nn.Linear(16, 8, bias=False)
    for rate in (1e-4, 1e-1):
        sgd = torch.optim.SGD(model.parameters(), lr=rate)
        given = {"optimizer": sgd, "master": master, "steps": 1}
        report = checked(model, level, "bf16", **given)
        found = [one for one in report.findings if one.rule == "swamped updates"]
        lost = report.facts.lost
        if master == "split":
            assert lost is None
            assert not found
            continue
        true = share_lost(model, rate, 1 + len(report.facts.ratios))
        assert lost == pytest.approx(true, abs=0.02)
        assert bool(found) == (lost > 0.05)
        shown = dict(report.tables()[0].rows)["updates rounded away"]
        assert shown == f"{lost:.0%} of one step, SGD, lr={rate:g}"
        if rate < 1e-3:
            assert lost > 0.9
            assert report.verdict.startswith("fails: SGD, lr=0.0001: ")
            assert found[0].severity == "error"
            assert found[0].where == "SGD, lr=0.0001"
            assert found[0].limit == "at most 5%"
            assert "master split" in found[0].advice


def test_a_rate_of_zero_loses_nothing() -> None:
    """Law: before a warm-up, at a rate of 0, no update is there to be lost."""
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    report = checked(model, "O3", "bf16", optimizer=sgd, steps=1)
    assert report.facts.lost is None
    assert "swamped updates" not in rules_of(report)


def gradients(
    model: nn.Module, level: str, dtype: str, scale: float
) -> dict[str, np.ndarray]:
    """Return a session's unscaled gradients, in float64, with the masks of a check."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    session = hs.prepare(twin, optimizer, level, dtype=dtype, loss_scale=scale)
    with session.autocast():
        value = loss(session.model, batch())
    session.backward(value)
    return {
        name: param.grad.double().numpy() / scale
        for name, param in twin.named_parameters()
        if param.grad is not None
    }


@pytest.mark.parametrize(("level", "dtype"), LOW)
def test_gradients_like_numpy(level: str, dtype: str) -> None:
    """Law: cosine and SQNR of each layer are numpy's in float64, of the same passes."""
    model, (report, before) = Net(), healthy(level, dtype)
    torch.set_rng_state(before)
    right = gradients(model, "O0", "fp32", 1.0)
    torch.set_rng_state(before)
    low = gradients(model, level, dtype, report.facts.scale)
    assert {one.where for one in report.facts.layers} == {
        name.rpartition(".")[0] for name in right
    }
    for one in report.facts.layers:
        names = [name for name in right if name.rpartition(".")[0] == one.where]
        x = np.concatenate([right[name].ravel() for name in names])
        q = np.concatenate([low[name].ravel() for name in names])
        cosine = np.dot(x, q) / np.linalg.norm(x) / np.linalg.norm(q)
        sqnr = 10 * np.log10(np.sum(x**2) / np.sum((x - q) ** 2))
        assert one.cosine == pytest.approx(cosine, abs=1e-9)
        assert one.sqnr == pytest.approx(sqnr, abs=1e-4)
        assert one.flushed == pytest.approx(np.mean(q[x != 0] == 0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_forward_overflow_and_its_cure(level: str) -> None:
    """Law: the module that overflows is named, and the rules advised cure it."""
    model = Net(LOUD)
    report = checked(model, level, "fp16")
    fault = report.facts.fault
    assert fault is not None
    # At O2 the weight itself is beyond fp16.
    phase = "weight" if level == "O2" else "forward"
    assert (fault.phase, fault.module, fault.kind) == (phase, "loud", "Linear")
    assert report.verdict.startswith("keep these modules in float32: module:loud=fp32")
    assert report.findings[0].rule == "overflow"
    assert "loud (linear)" in str(report)
    assert report.facts.gradients is not None
    assert report.facts.gradients.cosine > 0.99
    # As advised, the same model has nothing to be found.
    mended = checked(model, level, "fp16", policy=report.facts.policy)
    assert mended.verdict == "good"
    assert not mended.findings


class Normed(Net):
    """Normed by hand: x * x is inf in fp16 where x / rms is not."""

    def __init__(self, gain: float) -> None:
        super().__init__(gain)
        self.norm = Rms()


class Rms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_inf_that_a_division_hides(level: str) -> None:
    """Law: x * x is inf, x / inf is 0: the module that made it is named, and fixed."""
    report = checked(Normed(3000.0), level, "fp16")
    fault = report.facts.fault
    assert fault is not None
    assert (fault.module, fault.kind, fault.op) == ("norm", "Rms", "mul")
    worst = report.findings[0]
    assert (worst.severity, worst.rule) == ("error", "overflow")
    assert "float16 holds 65504; in float32 the result is finite" in str(worst)
    assert report.verdict.startswith("keep these modules in float32: module:norm=fp32")
    mended = checked(Normed(3000.0), level, "fp16", policy=report.facts.policy)
    assert mended.verdict == "good"
    assert checked(Normed(3.0), level, "fp16").verdict == "good"
    assert checked(Normed(3000.0), level, "bf16").verdict == "good"


def test_an_inf_that_only_the_loss_shows() -> None:
    """Law: an overflow without effect on gradients is named by its module, too."""

    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(3000 * x).detach()
            return (y / (y * y).mean().sqrt()).abs().mean()

    class Added(Net):
        def __init__(self) -> None:
            super().__init__()
            self.constant = Constant(16, 8).requires_grad_(requires_grad=False)

    def added(model: Any, given: Any) -> Tensor:
        return loss(model, given) + model.constant(given[0])

    report = checked(Added(), "O1", "fp16", loss_fn=added)
    assert report.facts.fault is not None
    assert report.facts.fault.module == "constant"
    assert report.facts.rules == ("module:constant=fp32",)


def test_a_rule_around_the_module() -> None:
    """Law: without autocast, where what a module gives is cast, its block is tried."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Net(LOUD), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(x))

    report = checked(Outer(), "O3", "fp16")
    assert report.facts.fault is not None
    assert report.facts.fault.module == "block.loud"
    first, *_, last = report.facts.rules
    assert (first, last) == ("module:block.loud=fp32", "module:block=fp32")
    mended = checked(Outer(), "O3", "fp16", policy=report.facts.policy)
    assert mended.verdict == "good"


def largest(model: nn.Module, level: str, loss_fn: Any) -> float:
    """Return the largest power of two at which a step is applied, by trying all."""
    state, best = torch.get_rng_state(), 0.0
    for power in range(-8, 60):
        torch.set_rng_state(state)
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
        scale = 2.0**power
        session = hs.prepare(twin, optimizer, level, dtype="fp16", loss_scale=scale)
        with session.autocast():
            value = loss_fn(session.model, batch())
        session.backward(value)
        if session.step().skipped:
            break
        best = scale
    torch.set_rng_state(state)
    return best


@pytest.mark.parametrize(
    ("level", "factor"),
    [("O1", 1e-6), ("O2", 3000.0), ("O3", 100.0), ("O1", -1e-6), ("O3", -1e-6)],
)
def test_the_largest_safe_scale(level: str, factor: float) -> None:
    """Law: it is at most the true one, found by trying all, and at least half of it.

    Large gradients that never are in 16 bits, as of the negative factors' sums of fp32
    numbers, do not lower it.
    """

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        if factor > 0:
            return loss(model, batch) * factor
        x, y = batch
        each = functional.mse_loss(model(x).float(), y, reduction="none")
        first, _ = (each.mean(1) * -factor).chunk(2)  # the rest has no gradient
        return first.sum()

    model = Net()
    true = largest(model, level, scaled)
    assert factor > 0 or true > 2.0**24
    report = checked(model, level, "fp16", loss_fn=scaled)
    safe = report.facts.safe_scale
    assert safe is not None
    assert true / 2 <= safe <= true
    bold = checked(model, level, "fp16", loss_fn=scaled, margin=0).facts.safe_scale
    assert bold in {true, true / 2}
    assert report.facts.default_finite == (true >= 2.0**16)
    if true < 2.0**16:
        assert report.verdict == f"good with a loss scale of {safe:g}"
        assert "loss scale" in rules_of(report)
        assert report.facts.fault is not None
        assert report.facts.fault.phase == "backward"
    else:
        assert report.verdict.startswith("good")


def test_the_share_lost_is_that_of_a_cast() -> None:
    """Law: the curve is what casting fp32's weight gradients to fp16 would lose.

    What fp16 flushes at the default scale is told, and cured by a larger one.
    """
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False)

    def tiny(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) * batch[1]).mean() * 1e-10

    report = checked(model, "O1", "fp16", loss_fn=tiny)
    x, y = batch()
    product = torch.full_like(y, 1e-10 / y.numel())
    weight = (product * y).T @ x  # once as the product gives it, once as it is kept
    seen = torch.cat([g.flatten() for g in (product, product * y, weight, weight)])
    for point in report.facts.curve:
        cast = (seen * point.scale).half()
        assert point.flushed == pytest.approx((cast == 0).double().mean().item())
        small = (cast != 0) & (cast.abs() < 2.0**-14)
        # Those just below a normal number are rounded up to it by the cast.
        lost = pytest.approx(small.double().mean().item(), abs=0.01)
        assert point.subnormal == lost
    facts = report.facts
    assert facts.curve[0].scale == 2.0**16
    assert "underflow" in rules_of(report)
    assert facts.scale == facts.safe_scale > 2.0**30
    assert report.verdict == f"good with a loss scale of 2**{math.log2(facts.scale):g}"
    assert checked(model, "O1", "bf16", loss_fn=tiny).verdict == "good"


def test_more_batches() -> None:
    """Law: overflow is that of all batches; the noise is told from two of them."""
    loud = batch()[0] * 1e6, batch()[1]
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    assert checked(model, "O1", "fp16").verdict == "good"
    report = checked(model, "O1", "fp16", more=[loud])
    assert report.facts.fault is not None
    assert report.facts.fault.module == "0"
    assert report.facts.noise_of == "two batches"


def test_a_level_that_fails() -> None:
    """Law: what a level raises is in the verdict, not an exception."""

    class Stubborn(Net):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.head.weight.float().new_ones(8, 16))[
                :, :8
            ] + self.head(torch.ones(1, 32))

    report = checked(Stubborn(), "O3", "bf16")
    assert report.verdict.startswith("fails: O3 bf16: raises ")
    assert "level" in rules_of(report)
    assert checked(Stubborn(), "O1", "bf16").facts.failed == ""


def test_times_and_memory() -> None:
    """Law: with steps, both levels are timed and weighed, as formats say."""
    report = checked(Net(), "O2", "bf16", steps=2)
    facts = report.facts
    assert facts.cost_fp32 is not None
    assert facts.cost is not None
    assert facts.speed_up is not None
    assert facts.speed_up > 0
    numbers = sum(param.numel() for param in Net().parameters())
    buffers = sum(buffer.nbytes for buffer in Net().buffers())
    # AdamW: two moments, and a step count of 4 bytes for each parameter.
    wide = facts.cost_fp32.memory
    assert wide["weights"] == 4 * numbers + buffers
    assert wide["gradients"] == 4 * numbers
    assert wide["masters"] == 0
    assert 8 * numbers <= wide["moments"] <= 8 * numbers + 4 * 16
    low = facts.cost.memory
    assert 2 * numbers < low["weights"] < wide["weights"]
    assert low["masters"] > 0
    assert low["saved"] < wide["saved"]
    assert wide["saved"] >= 4 * 32 * (16 + 32 + 32)


def test_data_and_tables() -> None:
    """Law: a report is JSON, text and tables, also of passes that broke."""
    whole = checked(Net(LOUD), "O2", "fp16", steps=1)
    broken = checked(Net(LOUD), "O3", "fp16")
    titles = [table.title for table in whole.tables()]
    assert titles == [
        "Check before training",
        "Gradients against fp32, by module",
        "Loss scales",
        "Time and memory",
        "Findings",
    ]
    assert len(broken.tables()) < len(titles)
    assert broken.verdict.startswith("fails: loud (linear): inf at loss scale 65536: ")
    assert "train in bf16" in broken.findings[0].advice
    for report in (whole, broken):
        told = json.loads(json.dumps(report.data(), allow_nan=False))
        assert told["verdict"] == report.verdict
        found = [Finding(**one) for one in told["findings"]]
        assert tuple(found) == report.findings
        assert told["facts"]["level"] == report.facts.level
        assert len(str(report).splitlines()) <= 5
        assert all(table.text() for table in report.tables())

"""A session at every level, format and optimizer, beside plain loops of torch."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import session_cases
import torch
from grids import thinned
from session_cases import (
    KINDS,
    everything,
    same,
    spoil,
)
from torch import Tensor, nn

from halfstep._torch import async_read
from halfstep.masters import fused_step
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

Make = Callable[[Any], torch.optim.Optimizer]


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# An epsilon that fp16 can hold, for O3 stores the optimizer's state in fp16.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "fused": functools.partial(ADAMW, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.02, eps=1e-3),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
}
FUSED: list[Make] = [
    functools.partial(SGD, fused=True),
    functools.partial(torch.optim.Adam, lr=0.02, fused=True),
    OPTIMIZERS["fused"],
]
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
FP32, INF = torch.float32, math.inf

table = pytest.mark.parametrize("kind", KINDS)
COMPACT = ["O2 bf16 split", "O2 bf16 kahan", "O2 bf16 stochastic"]


def grid(*kinds: str) -> Any:
    """Try a session of each kind with half of the optimizers."""
    makes = {name: (make,) for name, make in OPTIMIZERS.items()}
    tried = thinned({kind: (kind,) for kind in kinds}, makes, 2)
    return pytest.mark.parametrize(("kind", "make"), tried)


def build(
    kind: str = "O0 fp32", make: Make = SGD, seed: int = 0, **more: Any
) -> Session:
    return session_cases.build(kind, make, seed, **more)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 6, generator=generator)
    targets = inputs[:, :3] * inputs[:, 3:] + 0.5
    device = next(model.parameters()).device
    out = model(inputs.to(device))
    return nn.functional.mse_loss(out.float(), targets.to(device))


def go(session: Session, seed: int = 0) -> StepReport:
    with session.autocast():
        loss = loss_of(session.model, seed)
    session.backward(loss)
    return session.step()


@grid(*KINDS)
def test_loss_falls_and_dtypes_hold(kind: str, make: Make) -> None:
    """Law: training works, and weights, state and masters have the promised dtypes."""
    session = build(kind, make)
    low = session.choice.format.dtype
    losses = []
    for _ in range(30):
        with session.autocast():
            loss = loss_of(session.model, 0)
        session.backward(loss)
        assert session.step().applied
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    stored = [param.dtype for param in session.model.parameters()]
    in_low = {"O0": [FP32] * 6, "O1": [FP32] * 6, "O3": [low] * 6}
    in_low["O2"] = [low, low, FP32, FP32, low, low]
    assert stored == in_low[kind[:2]]
    updated = low if kind.startswith("O3") else FP32
    (group,) = session.optimizer.param_groups
    assert {param.dtype for param in group["params"]} == {updated}
    for entry in session.optimizer.state.values():
        state = [
            v.dtype for k, v in entry.items() if torch.is_tensor(v) and k != "step"
        ]
        assert set(state) == {updated}
    for param, master in zip(session.model.parameters(), group["params"], strict=True):
        assert torch.equal(param, master.to(param.dtype))
    assert {tensor.dtype for tensor in session.weights().values()} == {FP32}


@grid(*KINDS, *COMPACT)
def test_a_skipped_step_changes_nothing(kind: str, make: Make) -> None:
    """Law: on overflow weights, masters, state, counters stay; culprits are named."""
    session, clean = build(kind, make), build(kind, make)
    for number, value in enumerate((INF, math.nan)):
        before, scale = everything(session), session.scaler.state.scale.item()
        hooks = spoil(session, "0.bias", "3.weight", value=value)
        report = go(session, 5)
        same(everything(session), before)
        assert (report.skipped, report.applied, report.complete) == (True, False, True)
        assert report.found_inf_in == ("0.bias", "3.weight")
        assert (report.step, report.scale) == (3 * number + 1, scale)
        assert all(param.grad is None for param in session.model.parameters())
        for hook in hooks:
            hook.remove()
        with session.autocast():
            loss = loss_of(session.model, 5) * INF
        session.backward(loss)
        assert session.step().found_inf_in == NAMES
        same(everything(session), before)
        clean.scaler.load_state_dict(session.scaler.state_dict())
        assert go(session, number).applied
        assert go(clean, number).applied
        same(everything(session), everything(clean))
    assert (session.steps_skipped, session.steps_applied) == (4, 2)
    dynamic = session.choice.format.name == "fp16"
    assert session.scaler.state.scale.item() == (2.0**12 if dynamic else 1.0)


@table
def test_accumulation_is_the_mean(kind: str) -> None:
    """Law: the same micro-batch four times is the micro-batch once, to the bit."""
    once, four = build(kind), build(kind, accumulate=4)
    go(once, 0)
    reports = [go(four, 0) for _ in range(4)]
    told = [(each.complete, each.applied, each.step) for each in reports]
    assert told == [(False, False, 0)] * 3 + [(True, True, 1)]
    same(everything(four), everything(once))


@pytest.mark.parametrize(
    ("kind", "clip"), [("O0 fp32", 0.5), ("O1 fp16", None), ("O2 fp16", 0.5)]
)
@pytest.mark.parametrize("make", FUSED, ids=["sgd", "adam", "adamw"])
def test_a_kernel_that_skips(
    kind: str, make: Make, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the path that never asks the device ends where the asking one does."""
    ends = []
    monkeypatch.setattr(fused_step, "why_not_fused", lambda _: "no kernel")
    for readable in (async_read.READABLE_DEVICES, frozenset()):
        monkeypatch.setattr(async_read, "READABLE_DEVICES", readable)
        session = build(kind, make, clip_grad_norm=clip)
        reports = []
        for seed in range(5):
            hooks = spoil(session, "0.weight", "1.bias") if seed in (0, 3) else []
            before = everything(session)
            reports.append(go(session, seed))
            if seed == 3:
                same(everything(session), before)
            for hook in hooks:
                hook.remove()
        assert [r.skipped for r in reports] == [True, False, False, True, False]
        assert reports[3].found_inf_in == ("0.weight", "1.bias")
        assert reports[4].found_inf_in == ()
        ends.append((everything(session), [r.grad_norm for r in reports]))
    same(ends[0], ends[1], equal_nan=True)


def test_clipping_is_torchs() -> None:
    """Law: `math.inf` measures and does not clip; a low norm clips at every level."""
    free, measured = build(), build(clip_grad_norm=INF)
    assert (go(free).grad_norm or 0.0) < (go(measured).grad_norm or 0.0)
    same(everything(measured), everything(free))
    for kind in KINDS:
        session = build(kind, functools.partial(torch.optim.SGD, lr=1.0))
        session.clip_grad_norm = 2.0**-4
        before = copy.deepcopy(session.weights())
        go(session)
        moved = [v - before[k] for k, v in session.weights().items()]
        norm = math.sqrt(sum(m.float().square().sum().item() for m in moved))
        # At O3 an ulp of weights under 1/2 is 2**-10, of the norm's ones 2**-7: half
        # of it for each of 163 and 16. Elsewhere the step is one of fp32.
        room = 163**0.5 * 2.0**-11 + 4 * 2.0**-8 if kind.startswith("O3") else 2.0**-18
        assert norm == pytest.approx(2.0**-4, abs=room)


@pytest.mark.parametrize("clip", [1.0, INF])
@pytest.mark.parametrize("kind", ["O1 bf16", "O2 bf16"])
def test_a_norm_that_overflows(kind: str, clip: float) -> None:
    """Law: finite gradients are not clipped to 0 by an infinite norm, but skipped."""
    session = build(kind, clip_grad_norm=clip)
    with session.autocast():
        loss = sum(p.sum() for p in session.model.parameters()) * 3e38
    session.backward(loss)
    assert session.step().skipped == (clip == 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_gpu(kind: str) -> None:
    """Law: a fused optimizer's step never asks the device; a skip changes nothing."""
    session = build(kind, OPTIMIZERS["fused"], device="cuda", clip_grad_norm=1.0)
    go(session)
    for inject in (False, True):
        hooks = spoil(session, "3.bias") if inject else []
        before = everything(session)
        with session.autocast():
            loss = loss_of(session.model, 1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.backward(loss)
            report = session.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert report.skipped == inject
        assert report.found_inf_in == (("3.bias",) if inject else ())
        if inject:
            same(everything(session), before)
        for hook in hooks:
            hook.remove()

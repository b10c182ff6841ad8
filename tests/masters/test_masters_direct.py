"""Updates straight from 16-bit gradients, beside torch's optimizers and clipping."""

import copy
import math
from typing import Any

import kernel_twin
import master_cases as cases
import pytest
import torch
from master_cases import Make
from small_training import same
from torch import Tensor, nn

from halfstep.masters import MasterWeights, cpu_kernels

every_make = pytest.mark.parametrize(
    "make", cases.BUILT_IN.values(), ids=cases.BUILT_IN
)
ULP = 2.0**-7
"""Of bf16, relative: what one rounding at random may cost."""
ROUNDED = {"fp32": 0.0, "split": 0.0, "kahan": 2.0**-17, "stochastic": ULP}
"""Form -> what storing a truth may cost, relative."""
KEPT = {"fp32": 0.0, "split": 0.0, "kahan": ULP, "stochastic": ULP}
"""Form -> the same for a moment."""


@pytest.fixture(autouse=True)
def _compiled() -> None:
    kernel_twin.ready(cpu_kernels)


def close(ours: Any, right: Any, rounding: float) -> None:
    """Compare numbers of the size of 1, computed twice in fp32, then rounded."""
    room = 2.0**-17
    torch.testing.assert_close(ours, right, rtol=rounding + room, atol=room)


@cases.every_form
@cases.both_ways
def test_an_old_graph_is_refused(form: str, *, kernel: bool) -> None:
    """Law: a backward pass through weights updated since then fails, as in torch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    session = cases.start(cases.SGD, form, model, kernel=kernel)
    with session.autocast():
        losses = [model(torch.randn(2, 4)).float().sum() for _ in range(2)]
    session.backward(losses[0])
    session.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


@every_make
@cases.every_form
@cases.windows
def test_a_step_is_the_optimizers(
    make: Make, form: str, accumulate: int, clip: float | None
) -> None:
    """Law: a step by a kernel is the optimizer's own but for roundings."""
    more = {"accumulate": accumulate, "clip_grad_norm": clip}
    ours, right = (cases.start(make, form, kernel=k, **more) for k in (True, False))
    assert cases.masters_of(ours).kernel is not None
    for number in range(2):
        right.load_state_dict(copy.deepcopy(ours.state_dict()))
        seeds = range(number * accumulate, (number + 1) * accumulate)
        for session in (ours, right):
            slopes = (cases.slopes_of(session.model, seed) for seed in seeds)
            assert cases.go(session, *slopes).applied
        close(ours.weights(), right.weights(), ROUNDED[form])
        states = [session.optimizer.state_dict()["state"] for session in (ours, right)]
        close(*states, KEPT[form])


def test_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: torch's own step is never called where there is a kernel."""
    session = cases.start(cases.ADAMW, "split")

    def forbidden(*_: object) -> None:
        message = "torch stepped"
        raise AssertionError(message)

    monkeypatch.setattr(torch.optim.AdamW, "step", forbidden)
    slopes = cases.slopes_of(session.model, 1)
    cases.go(session, slopes)
    cases.masters_of(session).kernel = None
    with pytest.raises(AssertionError, match="torch stepped"):
        cases.go(session, slopes)


@cases.every_form
@pytest.mark.parametrize("make", [cases.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("clip", [0.25, 1e6, math.inf])
def test_norm_is_torchs(make: Make, form: str, clip: float) -> None:
    """Law: `grad_norm` is the fp64 norm of unscaled gradients; a large limit is none.

    Within one rounding a number of fp32 where torch adds up squares.
    """
    session, free, scaled = (
        cases.start(make, form, clip_grad_norm=c, loss_scale=scale)
        for c, scale in ((clip, "none"), (None, "none"), (clip, 1024.0))
    )
    for number in range(2):
        slopes = cases.slopes_of(session.model, number)
        report = cases.go(session, slopes)
        exact = math.sqrt(
            sum(s.double().square().sum().item() for s in slopes.values())
        )
        count = sum(s.numel() for s in slopes.values())
        assert report.grad_norm == pytest.approx(exact, rel=count * 2.0**-24)
        assert cases.go(free, slopes).grad_norm is None
        # Powers of two: no bit may differ.
        assert cases.go(scaled, slopes).grad_norm == report.grad_norm
    assert same(cases.everything(session), cases.everything(free)) == (clip > 1)
    assert same(cases.everything(session), cases.everything(scaled))


@cases.every_form
@pytest.mark.parametrize("make", [cases.MOMENTUM, cases.ADAMW])
def test_layout_may_change(make: Make, form: str) -> None:
    """Law: `model.to(memory_format=...)` after `prepare` moves no number.

    A kernel goes by memory; what is kept beside a weight must lie as the weight does.
    """
    sessions = [cases.start(make, form) for _ in range(2)]
    for number in range(4):
        if number == 2:
            before = cases.everything(sessions[0])
            sessions[0].model.to(memory_format=torch.contiguous_format)
            conv = sessions[0].model.conv
            conv.weight.data = conv.weight.data.contiguous()
            assert conv.weight.is_contiguous()
            assert same(cases.everything(sessions[0]), before)
        slopes = cases.slopes_of(sessions[0].model, 2 * number)
        for session in sessions:
            cases.go(session, slopes)
    one, other = (session.weights() for session in sessions)
    if form in {"fp32", "split"}:
        assert same(one, other)
        return
    # Random bits go by place in memory, so here the form's rounding may differ.
    for name, value in one.items():
        bound = 2 * (KEPT[form] + ROUNDED[form]) * (value.abs() + 0.1)
        assert bool(((value - other[name]).abs() <= 2 * bound).all()), name


@cases.every_form
def test_originals_may_lie_otherwise(form: str) -> None:
    """Law: fp32 values to begin with count by place, not by memory."""
    torch.manual_seed(0)
    original = torch.randn(4, 6).t()
    weight = nn.Parameter(original.bfloat16().contiguous())
    assert weight.stride() != original.stride()
    optimizer = torch.optim.SGD([weight], 1.0)
    masters = MasterWeights(optimizer, {weight: original.clone()}, master=form)
    weight.grad = torch.ones_like(weight)
    masters.update(torch.ones(()))
    (held,) = cases.adopted(optimizer)
    off = (masters.fp32_value(held) - (original - 1)).abs()
    # Stored twice: before the step, and after it.
    limit = 2 * ROUNDED[form] * (original.abs() + 1)
    assert bool((off <= limit).all())


class Odd(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.more = nn.Parameter(torch.randn(3))

    forward = cases.Mixed.forward


LAYOUTS = {
    "transposed": (torch.randn(4, 3).t(), True),
    "channels_last": (
        torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        True,
    ),
    "permuted": (torch.randn(2, 3, 4).permute(2, 0, 1), True),
    "gaps": (torch.randn(8, 3)[::2], False),
    "scalar": (torch.randn(()), True),
    "empty": (torch.randn(0, 3), True),
    "column": (torch.randn(1, 3).t(), True),
}


@cases.every_form
@pytest.mark.parametrize("make", [cases.MOMENTUM, cases.ADAMW])
@pytest.mark.parametrize(("weight", "known"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(make: Make, form: str, weight: Tensor, *, known: bool) -> None:
    """Law: a weight with gaps has no kernel, all others have; both are torch's step."""
    low = Odd(weight.bfloat16() if known else weight.clone())
    if not known:
        gaps = torch.zeros(8, 3, dtype=torch.bfloat16)[::2]
        low = low.bfloat16()
        low.weight.data = gaps.copy_(weight)
    optimizer = make(low.parameters())
    masters = MasterWeights(optimizer, master=form)
    assert (masters.kernel is not None) == known
    if known:
        assert low.weight.stride() == weight.stride()
    else:
        assert "gaps in memory" in masters.describe()
    twin = copy.deepcopy(low).float()
    reference = make(twin.parameters())
    for param, other in zip(low.parameters(), twin.parameters(), strict=True):
        param.grad = torch.ones_like(param)
        other.grad = torch.ones_like(other)
    if known:
        masters.update(torch.ones(()))
    else:
        masters.step()
    reference.step()
    for held, other in zip(cases.adopted(optimizer), twin.parameters(), strict=True):
        # One step: some roundings of fp32, and what the form takes.
        limit = 40 * 2.0**-24 * (other.abs() + 1) + ROUNDED[form] * (other.abs() + 1)
        assert bool(((masters.fp32_value(held) - other).abs() <= limit).all())

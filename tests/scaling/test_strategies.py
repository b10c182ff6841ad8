"""Measured at work on small fp16 networks."""

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scale_loop import BAD, CLEAN, NETS, RULE, Block, Loop, NoWaiting, plain, training
from torch import Tensor, nn

from halfstep.scaling import ScaleState, advance
from halfstep.scaling.loss_scale import STRATEGIES
from halfstep.scaling.strategies import LogMaxStrategy, MeasuredStrategy, make_strategy


def gradients_at(loop: Loop, scale: float) -> list[Tensor]:
    torch.manual_seed(1)
    (loop.loss() * scale).backward()
    return loop.gradients()


def overflows(loop: Loop, scale: float) -> bool:
    return not all(g.isfinite().all() for g in gradients_at(loop, scale))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("exponent", [-30, -10, 0, 12, 22])
@pytest.mark.parametrize("first", [1.0, 2.0**16, 2.0**32])
def test_no_step_is_lost(name: str, exponent: int, first: float) -> None:
    """Law: from any first scale, the trial finds one that is safe and nearly highest.

    With a margin of 1 the largest 16-bit gradient comes to lie in [2**14, 2**15): the
    step is clean at it, and overflows at four times as much.
    """
    loop = training(NETS[name](), 2.0**exponent, scale=first)
    torch.manual_seed(1)
    assert not loop.step()
    scale = loop.state.scale.item()
    assert math.frexp(scale)[0] == 0.5
    assert not overflows(loop, scale)
    assert overflows(loop, scale * 4)


FIRST = [
    # 2**(15 - e - margin), for the one gradient 3 * 2**-9, e = -8.
    *((margin, 3 * 2.0**-9, 2.0 ** (23 - margin)) for margin in (0, 1, 4)),
    # Zeros, or a loss that is not finite, leave the scale where it is.
    *((1, factor, 2.0**16) for factor in (0.0, 2.0**-60, math.inf, math.nan)),
    # Where fp16 holds nothing at 1, the trial goes on at 2**12 and 2**24; or below.
    *((1, 2.0**exponent, 2.0 ** (14 - exponent)) for exponent in (-26, -38, 20)),
]


@pytest.mark.parametrize(("margin", "size", "expected"), FIRST)
def test_first_scale(margin: int, size: float, expected: float) -> None:
    """Law: the trial says so, and the step's own look says it again."""
    loop = plain(MeasuredStrategy(margin=margin), size)
    loop.begin().backward()
    assert loop.state.scale.item() == expected
    loop.end()
    assert loop.wish.item() == expected


@pytest.mark.parametrize(
    ("first", "powers"),
    [
        # Backwards it goes 2**-10, 2**-20, 2**-30, 2**-15, 1. At scale 1 fp16 holds the
        # first two: they would allow 2**24, where the last is 2**24. It allows 2**14.
        (2.0**-20, (15, 15, -10, -10)),
        # Backwards 2**-10, 2**-25, 2**-40, and up to 2**5: from 2**16 on fp16 holds the
        # third, and the last is inf; below, all after the second are zero.
        (0.0, (15, 15, 15, -15, -15)),
    ],
)
def test_a_low_scale_shows_little(first: float, powers: tuple[int, ...]) -> None:
    """Law: what it flushed is looked at again; one that overflowed is left for good."""
    weight = torch.full((3,), first, requires_grad=True)

    def loss() -> Tensor:
        grown = weight.half()
        for power in powers:
            grown = grown * 2.0**power
        return grown.float().sum() * 2.0**-10

    loop = Loop(MeasuredStrategy(), loss, [weight])
    loop.begin()
    assert loop.state.scale.item() == 2.0**14


LOOKS: dict[str, tuple[int, list[float], list[float | None]]] = {
    "the scale follows the gradients": (2, [1.0, 2.0], [2.0**14, None, 2.0**13]),
    "the lowest of ten looks counts": (
        *(1, [2.0**5, *[1.0] * 10], [*[2.0**9] * 10, 2.0**14]),
    ),
    "losses that take turns are steps of their own": (
        *(3, [1.0, 4.0] * 9, [2.0**14, None, None, 2.0**12, None, None, 2.0**12]),
    ),
}
"""Law -> steps between two looks, gradients, and what each step asks for."""


@pytest.mark.parametrize("law", LOOKS)
def test_looks(law: str) -> None:
    every, sizes, wishes = LOOKS[law]
    loop = plain(MeasuredStrategy(every=every), *sizes)
    for wish in wishes:
        loop.step()
        assert wish is None or loop.state.scale.item() == wish
    assert loop.wishes == wishes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_formats_are_not_looked_at(dtype: torch.dtype) -> None:
    """Law: gradients in bf16 and fp32 do not overflow, and leave the scale alone.

    One backward pass shows that there is nothing to try; the other is the step's.
    """
    weight = torch.ones(3, requires_grad=True)
    passes: list[Tensor] = []
    weight.register_hook(passes.append)
    loop = Loop(
        MeasuredStrategy(),
        lambda: (weight.to(dtype) * 2.0**-30).float().sum(),
        [weight],
    )
    assert not loop.step()
    assert loop.state.scale.item() == 2.0**16
    assert len(passes) == 2


def test_16_bit_leaves_and_losses() -> None:
    """Law: gradients of 16-bit parameters count, and that of a 16-bit loss: its scale.

    The loss's own gradient is S, e = 0: 2**14. The leaf's is 32 times that: 2**9.
    """
    weight = torch.ones(3, dtype=torch.float16, requires_grad=True)
    for factor, expected in (2.0**-5, 2.0**14), (32.0, 2.0**9):
        loop = Loop(MeasuredStrategy(), lambda f=factor: (weight * f).sum(), [weight])
        loop.begin()
        assert loop.state.scale.item() == expected


def test_an_overflow_counts_as_a_look() -> None:
    """Law: a scale S that overflowed keeps proposals at S / 4 while its look counts."""
    watched, state = MeasuredStrategy(), ScaleState.first(RULE, "cpu")
    state = replace(state, scale=torch.tensor(2.0**12))
    watched.on_found_inf(state, torch.tensor(1.0))  # there is no look yet
    assert watched.state_dict()["recent"] == []
    watched.load_state_dict({"steps": 7, "recent": [2.0**14, 2.0**13]})
    watched.on_found_inf(state, torch.tensor(0.0))
    assert watched.state_dict()["recent"] == [2.0**14, 2.0**13]
    watched.on_found_inf(state, torch.tensor(1.0))
    watched.on_found_inf(state, torch.tensor(0.0))
    assert watched.state_dict()["recent"] == [2.0**14, 2.0**10]


def test_losses_of_one_step() -> None:
    """Law: all micro-batches of a due step count; the first alone is tried.

    Sizes 1, 2 and 0.5, e at most 1: 2**13. Tried is 1: 2**14.
    """
    loop = plain(MeasuredStrategy(), 1.0, 2.0, 0.5)
    for _ in range(3):
        loop.begin().backward()
        assert loop.state.scale.item() == 2.0**14
    assert not loop.end()
    assert loop.state.scale.item() == 2.0**13


def test_optimizers_of_one_step() -> None:
    """Law: one loss of two optimizers is one step, and what it showed is told once."""
    loop = plain(MeasuredStrategy(every=2), 1.0)
    for due in True, False, True:
        loop.begin().backward()
        loop.end()
        assert (loop.wish is not None) == due
        assert loop.strategy.propose([], loop.state, CLEAN) is None


class Counted(torch.autograd.Function):
    repeatable = False
    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.repeatable = Counted.repeatable
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        Counted.passes += 1
        return gradient


@pytest.mark.parametrize("repeatable", [False, True])
def test_functions_are_run_once(
    repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: no trial of a backward pass in Python, unless it says that it bears it.

    Its first step is still looked at: e = 0 gives 2**14.
    """
    monkeypatch.setattr(Counted, "repeatable", repeatable)
    monkeypatch.setattr(Counted, "passes", 0)
    weight = torch.ones(3, requires_grad=True)

    def loss() -> Tensor:
        out: Tensor = Counted.apply(weight)
        return out.half().float().sum()

    loop = Loop(MeasuredStrategy(), loss, [weight], scale=8.0)
    loop.begin().backward()
    assert (Counted.passes > 1) == repeatable
    assert loop.state.scale.item() == (2.0**14 if repeatable else 8.0)
    loop.end()
    assert loop.state.scale.item() == 2.0**14


def test_reentrant_checkpoints() -> None:
    """Law: they cannot be tried, and do not break; the first step is looked at."""
    net = nn.Sequential(nn.Linear(8, 16), Block(checkpointed=True), nn.Linear(16, 1))
    loop = training(net, scale=2.0**10)
    loop.begin().backward()
    assert loop.state.scale.item() == 2.0**10
    assert not loop.end()
    assert loop.wish is not None


@pytest.mark.parametrize("name", NETS)
def test_a_trial_leaves_no_trace(name: str) -> None:
    """Law: `.grad`, random numbers and what the step itself gives are as without it.

    Hooks after accumulation, of which DDP's is one, do not fire.
    """
    loop = training(NETS[name]())
    fired: list[Tensor] = []
    before = []
    for parameter in loop.parameters:
        before.append(torch.full_like(parameter, 7.0))
        parameter.grad = before[-1]
        parameter.register_post_accumulate_grad_hook(fired.append)
    torch.manual_seed(1)
    loss = loop.loss()
    random = torch.get_rng_state()
    scale = loop.strategy.on_loss(loss, loop.state)
    assert torch.equal(torch.get_rng_state(), random)
    assert not fired
    for parameter, gradient in zip(loop.parameters, before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, torch.full_like(gradient, 7.0))
        parameter.grad = None
    (loss * scale).backward()
    tried = loop.gradients()
    for gradient, twin in zip(tried, gradients_at(loop, scale.item()), strict=True):
        assert torch.equal(gradient, twin)


@dataclass(eq=False)
class Saved:
    tensor: Tensor


def test_nothing_is_left_behind() -> None:
    """Law: no hook stays on a graph that is kept; a graph that is not kept dies."""
    watched = MeasuredStrategy(every=1)
    loop = training(NETS["mlp"](), own=watched)
    held: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        held.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = loop.begin()
    loss.backward(retain_graph=True)
    loop.end()
    loss.backward(retain_graph=True)
    assert not watched._counts
    gc.disable()
    try:
        assert any(saved() is not None for saved in held)
        del loss
        assert all(saved() is None for saved in held)
    finally:
        gc.enable()


def test_a_loss_without_history() -> None:
    """Law: a loss that leads nowhere is none of a step."""
    watched = MeasuredStrategy()
    state = ScaleState.first(RULE)
    assert watched.on_loss(torch.tensor(1.0), state) is None
    assert watched.state_dict() == {"steps": 0, "recent": []}


def test_measured_goes_on() -> None:
    """Law: after loading, no trial is made, and looks are due when they would be."""
    loop = training(NETS["mlp"](), own=MeasuredStrategy(every=3))
    for _ in range(4):
        loop.step()
    saved = loop.strategy.state_dict()
    assert (saved["steps"], len(saved["recent"])) == (4, 2)
    loop.strategy = MeasuredStrategy(every=3)
    loop.strategy.load_state_dict(saved)
    scale = loop.state.scale.item()
    loop.state = replace(loop.state, scale=loop.state.scale / 8)
    for _ in range(3):
        loop.step()
    assert [wish is not None for wish in loop.wishes] == [
        step in {0, 3, 6} for step in range(7)
    ]
    assert loop.state.scale.item() == scale


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_no_step_is_lost_on_a_gpu(name: str, exponent: int) -> None:
    """Law: the trial finds a safe and nearly highest scale there too."""
    loop = training(NETS[name](), 2.0**exponent, device="cuda")
    loss = loop.loss()
    random = torch.cuda.get_rng_state()
    scale = loop.strategy.on_loss(loss, loop.state)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    (loss * scale).backward()
    assert all(gradient.isfinite().all() for gradient in loop.gradients())


# LogMax against a float64 twin; what holds for every strategy


class Twin:
    def __init__(self, beta1: float, beta2: float, k: float) -> None:
        self.beta1, self.beta2, self.k = beta1, beta2, k
        self.xs: list[float] = []

    def ema(self, values: Sequence[float], beta: float) -> float:
        weights = beta ** np.arange(len(values))[::-1]
        return float(np.average(values, weights=weights))

    def bound(self) -> float:
        squares = [x * x for x in self.xs]
        slow = self.ema(self.xs, self.beta2)
        variance = max(self.ema(squares, self.beta2) - slow * slow, 0.0)
        return 16 - (self.ema(self.xs, self.beta1) + self.k * math.sqrt(variance))


PEAK = st.floats(2.0**-30, 2.0**10, width=32) | st.sampled_from([0.0, math.inf])


@given(
    st.lists(PEAK, min_size=1, max_size=14),
    st.sampled_from([(0.99, 0.999, 3.09), (0.5, 0.0, 1.0), (0.0, 0.9, 0.0)]),
)
def test_logmax_is_its_formulas(
    peaks: list[float], numbers: tuple[float, float, float]
) -> None:
    """Law: over any trace it asks for what the float64 twin says.

    An overflow counts as 16 - log2 S, zeros alone as nothing.
    """
    twin, own = Twin(*numbers), LogMaxStrategy(*numbers)
    state = ScaleState.first(RULE)
    for peak in peaks:
        scale = state.scale.item()
        if math.isinf(peak):
            twin.xs.append(16 - math.log2(scale))
        elif peak:
            twin.xs.append(math.log2(peak))
        gradients = [torch.tensor([0.0, -peak]), torch.tensor(peak / 2)]
        found = torch.tensor(float(math.isinf(peak)))
        wish = own.propose(gradients, state, found)
        expected = scale
        if twin.xs:
            bound = twin.bound()
            # Next to a whole number the last bit decides.
            assume(abs(bound - round(bound)) > 1e-6)
            expected = 2.0 ** min(max(math.floor(bound), -126), 127)
        assert wish.item() == expected
        state = advance(state, found, RULE, wish)


def test_logmax_takes_the_others_word() -> None:
    """Law: an overflow on another rank counts, though these gradients are finite.

    S = 2**16: x = 0, so 2**16 is asked for, not what 2**-20 would allow.
    """
    own, state = LogMaxStrategy(), ScaleState.first(RULE)
    wish = own.propose([torch.tensor(2.0**-20)], state, BAD)
    assert wish.item() == 2.0**16


def test_logmax_without_gradients() -> None:
    """Law: an optimizer without gradients changes nothing, but comes to the look."""
    own, state = LogMaxStrategy(), ScaleState.first(RULE)
    assert own.propose([], state, CLEAN).item() == 2.0**16
    state = advance(state, CLEAN, RULE)
    wish = own.propose([torch.tensor(1.0)], state, CLEAN)
    assert own.propose([], advance(state, CLEAN, RULE), CLEAN).item() == wish.item()
    assert own.state_dict()["steps"] == 1


@pytest.mark.parametrize("word", STRATEGIES)
def test_words(word: str) -> None:
    """Law: each word of a rule makes its strategy, new each time; {} begins anew."""
    made = make_strategy(word)
    if word == "backoff":
        assert made is None
        return
    assert made is not make_strategy(word)
    fresh = made.state_dict()
    made.load_state_dict({})
    assert made.state_dict() == fresh


@pytest.mark.parametrize("word", STRATEGIES[1:])
def test_nothing_waits(word: str) -> None:
    """Law: after the first step, no number is read on the host: looks included."""
    own: Any = MeasuredStrategy(every=2) if word == "measured" else make_strategy(word)
    loop = training(NETS["norm"](), own=own)
    loop.step()
    for _ in range(4):
        with NoWaiting():
            loop.begin().backward()
            gradients = loop.gradients()
            wish = own.propose(gradients, loop.state, CLEAN)
        # On a CPU the rule itself is a matter of the host.
        loop.state = advance(loop.state, CLEAN, RULE, wish)
    with NoWaiting(), pytest.raises(AssertionError):
        CLEAN.item()


@pytest.mark.gpu
@pytest.mark.parametrize("word", STRATEGIES[1:])
def test_nothing_waits_on_a_gpu(word: str) -> None:
    """Law: after the first step the driver sees no wait either."""
    own: Any = MeasuredStrategy(every=2) if word == "measured" else make_strategy(word)
    loop = training(NETS["norm"](), own=own, device="cuda")
    loop.step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            loop.begin().backward()
            loop.end()
    finally:
        torch.cuda.set_sync_debug_mode(before)

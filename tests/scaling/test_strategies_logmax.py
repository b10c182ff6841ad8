"""LogMax against a float64 twin; what holds for every strategy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scale_loop import BAD, CLEAN, NETS, RULE, NoWaiting, training

from halfstep.scaling import ScaleState, advance
from halfstep.scaling.loss_scale import STRATEGIES
from halfstep.scaling.strategies import LogMaxStrategy, MeasuredStrategy, make_strategy


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

"""What apex's multi-tensor kernels did, done by ours: unscaling, sums, norms, flags.

The oracle is numpy in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from apex_programs.process import fresh
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.compat.apex import amp
from halfstep.numerics.norms import total_norm
from halfstep.scaling import ScaleRule, ScaleState, advance, unscale_

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = st.lists(
    st.sampled_from([0, 1, 2, 7, 16, 33, 2047, 2048, 2049]), min_size=1, max_size=4
)
DTYPES = st.sampled_from([torch.float16, torch.float32])
POWERS = st.integers(0, 24)


def drawn(sizes: list[int], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Return gradients, from 1/8 to 1, which no scale here brings below fp16."""
    parts = zip(sizes, dtypes, strict=False)
    return [(torch.rand(size) * 0.875 + 0.125).to(dtype) for size, dtype in parts]


@given(sizes=SIZES, dtypes=st.lists(DTYPES, min_size=4, max_size=4), power=POWERS)
def test_unscaling(sizes: list[int], dtypes: list[torch.dtype], power: int) -> None:
    """Law: every element is divided in place, rounded once, and nothing is flagged."""
    grads = drawn(sizes, dtypes)
    exact = [grad.double().numpy() / 2.0**power for grad in grads]
    same = [grad.data_ptr() for grad in grads]
    assert unscale_(grads, torch.tensor(2.0**-power)) == 0
    assert [grad.data_ptr() for grad in grads] == same
    for grad, right in zip(grads, exact, strict=True):
        kind: Any = np.float16 if grad.dtype == torch.float16 else np.float32
        np.testing.assert_array_equal(grad.numpy(), right.astype(kind))


@given(
    sizes=SIZES.filter(any),
    dtype=DTYPES,
    value=st.sampled_from([np.inf, -np.inf, np.nan]),
    place=st.sampled_from(["first", "middle", "last"]),
    which=st.integers(0, 3),
)
def test_one_bad_element(
    sizes: list[int], dtype: torch.dtype, value: float, place: str, which: int
) -> None:
    """Law: one inf or NaN anywhere is flagged, and the same without it is not."""
    grads = drawn(sizes, [dtype] * 4)
    filled = [grad for grad in grads if grad.numel()]
    bad = filled[which % len(filled)]
    assert unscale_([grad.clone() for grad in grads], torch.tensor(0.5)) == 0
    index = {"first": 0, "middle": bad.numel() // 2, "last": -1}[place]
    bad[index] = value
    assert unscale_(grads, torch.tensor(0.5)) == 1


@given(sizes=SIZES, dtypes=st.lists(DTYPES, min_size=4, max_size=4), power=POWERS)
def test_norm_after_unscaling(
    sizes: list[int], dtypes: list[torch.dtype], power: int
) -> None:
    """Law: the norm of what was unscaled is numpy's, in the precision of its parts.

    Each tensor's own norm is rounded to its dtype; their squares add up in fp32.
    """
    grads = drawn(sizes, dtypes)
    # fp16 keeps all digits down to 2**-14.
    power = min(power, 11)
    exact = np.concatenate([grad.double().numpy() for grad in grads]) / 2.0**power
    unscale_(grads, torch.tensor(2.0**-power))
    norm = float(total_norm(grads) or 0.0)
    expected = float(np.sqrt((exact**2).sum()))
    assert norm == pytest.approx(expected, rel=2 * 2.0**-11, abs=2.0**-24)


@given(
    first=st.integers(0, 16),
    second=st.integers(0, 16),
    size=st.sampled_from([1, 7, 33]),
    seed=st.integers(0, 9),
)
def test_sum_of_two_scales(first: int, second: int, size: int, seed: int) -> None:
    """Law: a*x + b*y, as apex's kernel had it: fp32, rounded once, any two scales."""
    with fresh():
        torch.manual_seed(seed)
        x, y = torch.rand(size), torch.rand(size)
        weight = nn.Parameter(torch.zeros(size))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        net = nn.ParameterList([weight])
        amp.initialize(
            net,
            optimizer,
            opt_level="O0",
            num_losses=2,
            verbosity=0,
            loss_scale="dynamic",
        )
        for number, (power, part) in enumerate(((first, x), (second, y))):
            amp._amp_state.loss_scalers[number]._loss_scale = 2.0**power
            with amp.scale_loss(
                (weight * part).sum(), optimizer, loss_id=number
            ) as scaled:
                scaled.backward()
        assert weight.grad is not None
        np.testing.assert_array_equal(weight.grad.numpy(), x.numpy() + y.numpy())


def hysteresis(
    flags: list[bool], bear: int, window: int
) -> tuple[list[float], list[int]]:
    """Return scales and trackers, by a model in plain Python."""
    scale, clean, left = 2.0**10, 0, bear
    scales, trackers = [], []
    for bad in flags:
        if bad:
            clean, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, 1.0)
        else:
            clean += 1
            if clean == window:
                scale, clean, left = scale * 2, 0, bear
        scales.append(scale)
        trackers.append(left)
    return scales, trackers


@given(
    flags=st.lists(st.booleans(), max_size=40),
    bear=st.integers(1, 4),
    window=st.integers(1, 4),
)
def test_hysteresis(flags: list[bool], bear: int, window: int) -> None:
    """Law: scale and trackers move as a model in Python does, any history."""
    rule = ScaleRule(2.0**10, growth_interval=window, hysteresis=bear, max_scale=2e30)
    state = ScaleState.first(rule)
    scales, trackers = [], []
    for bad in flags:
        state = advance(state, torch.tensor(float(bad)), rule)
        scales.append(float(state.scale))
        trackers.append(int(state.hysteresis_left))
    assert (scales, trackers) == hysteresis(flags, bear, window)


def test_flags_are_kept_apart() -> None:
    """Law: an overflow for one loss scaler lowers that one alone."""
    with fresh():
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        amp.initialize(net, optimizer, opt_level="O2", num_losses=2, verbosity=0)
        spoil: Callable[[Tensor], Tensor] = lambda grad: grad * torch.inf  # noqa: E731
        hook = net.bias.register_hook(spoil)
        for number in range(2):
            with amp.scale_loss(
                net(torch.ones(1, 2)).mean(), optimizer, loss_id=number
            ) as scaled:
                scaled.backward()
            hook.remove()
        scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
        assert scales == [2.0**15, 2.0**16]

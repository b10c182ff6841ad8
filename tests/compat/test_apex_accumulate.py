"""`amp.scale_loss`: sums over passes, delays, schedules, and a scale that collapses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from apex_programs.process import LEVELS, fresh
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.apex import amp
from halfstep.compat.apex.state import STATE


def start(level: str, **kwargs: Any) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    kwargs = {"opt_level": level, "verbosity": 0, "loss_scale": "dynamic"} | kwargs
    return amp.initialize(net, optimizer, **kwargs)


def loss_of(net: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(5, 4, generator=draw), torch.randn(5, 3, generator=draw)
    return nn.functional.mse_loss(net(x).float(), y)


def backward(net: nn.Module, optimizer: Any, seed: int, **kwargs: Any) -> None:
    with amp.scale_loss(loss_of(net, seed), optimizer, **kwargs) as scaled:
        scaled.backward()


def gradients(optimizer: Any) -> list[Tensor]:
    return [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]


@given(
    scales=st.lists(st.integers(0, 14), min_size=2, max_size=4),
    level=st.sampled_from(LEVELS),
)
def test_sums_are_exact_over_scales(scales: list[int], level: str) -> None:
    """Law: the sum of passes at different scales is the sum of their own gradients."""
    with fresh():
        net, optimizer = start(level, num_losses=len(scales))
        for scaler, power in zip(STATE.loss_scalers, scales, strict=True):
            scaler.set_state(2.0**power, 0)
        parts = []
        for number in range(len(scales)):
            optimizer.zero_grad()
            backward(net, optimizer, number, loss_id=number)
            parts.append(gradients(optimizer))
        optimizer.zero_grad()
        for number in range(len(scales)):
            backward(net, optimizer, number, loss_id=number)
        for place, found in enumerate(gradients(optimizer)):
            total = parts[0][place]
            for part in parts[1:]:
                total = total + part[place]
            torch.testing.assert_close(found, total, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_scale_moves_between_passes(level: str) -> None:
    """Law: what is unscaled before the scale moves is right after it too."""
    net, optimizer = start(level)
    scaler = STATE.loss_scalers[0]
    scaler.set_state(64.0, 1999)
    backward(net, optimizer, 0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    backward(net, optimizer, 1)
    found = gradients(optimizer)
    optimizer.zero_grad()
    scaler.set_state(64.0, 0)
    for seed in (0, 1):
        backward(net, optimizer, seed)
    for one, other in zip(found, gradients(optimizer), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2.0**-14)


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_passes(level: str) -> None:
    """Law: delayed passes are unscaled together, sums from before them kept apart.

    The scale counts passes that were looked at, not those that waited.
    """
    net, optimizer = start(level)
    STATE.loss_scalers[0].set_state(16.0, 0)
    for seed, delay in enumerate((False, True, True, False)):
        backward(net, optimizer, seed, delay_unscale=delay)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2
    found = gradients(optimizer)
    twin, plain = start("O0", loss_scale=1.0)
    for seed in range(4):
        backward(twin, plain, seed)
    # Up to four passes through fp16 products of size 1, summed in fp16.
    bound = 4 * 2.0**-23 if level == "O0" else 4 * 4 * 2.0**-10
    for one, other in zip(found, gradients(plain), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=bound)


@pytest.mark.parametrize("level", LEVELS)
def test_step_with_scaled_gradients_is_refused(level: str) -> None:
    """Law: gradients that nobody unscaled never reach the weights.

    A sum of gradients with two scales has none, and is refused.
    """
    net, optimizer = start(level, num_losses=2)
    STATE.loss_scalers[1].set_state(8.0, 0)
    backward(net, optimizer, 0, delay_unscale=True)
    with pytest.raises(amp.AmpError, match="still scaled by 65536"):
        optimizer.step()
    with (
        pytest.raises(amp.AmpError, match="this loss is scaled by 8: leave"),
        amp.scale_loss(loss_of(net, 1), optimizer, loss_id=1),
    ):
        pass
    optimizer.zero_grad()
    optimizer.step()
    backward(net, optimizer, 1, loss_id=1)


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_check(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a check that is put off is made before the step, and skips it."""
    net, optimizer = start(level, verbosity=1)
    before = [p.clone() for p in net.parameters()]
    with amp.scale_loss(
        loss_of(net, 0), optimizer, delay_overflow_check=True
    ) as scaled:
        scaled.backward()
        net.bias.grad[0] = torch.nan
    assert STATE.loss_scalers[0].loss_scale() == 65536
    optimizer.step()
    assert STATE.loss_scalers[0].loss_scale() == 32768
    assert "Gradient overflow." in capsys.readouterr().out
    for param, was in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, was)


@pytest.mark.parametrize(
    ("level", "scale", "words"),
    [
        *((level, "dynamic", "reducing loss scale to 32768.0") for level in LEVELS),
        ("O2", 128.0, "has a static loss scale of 128.0"),
    ],
)
def test_message_of_a_skipped_step(
    level: str, scale: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a skipped step is reported in apex's words, once; the next one is taken."""
    net, optimizer = start(level, verbosity=1, loss_scale=scale)
    capsys.readouterr()
    with amp.scale_loss(loss_of(net, 0), optimizer) as scaled:
        scaled.backward()
        net.bias.grad[0] = torch.inf
    assert capsys.readouterr().out == ""
    before = [p.clone() for p in net.parameters()]
    optimizer.step()
    text = "Gradient overflow.  Skipping step, loss scaler 0"
    assert capsys.readouterr().out == f"{text} {words}\n"
    assert all(map(torch.equal, net.parameters(), before))
    optimizer.zero_grad()
    backward(net, optimizer, 0)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert not all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("first", ["scheduler", "amp"])
@pytest.mark.parametrize("level", LEVELS)
def test_schedules(level: str, first: str) -> None:
    """Law: a schedule works, made before or after, with the first step skipped."""
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if first == "amp":
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if first == "scheduler":
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in range(3):
            with amp.scale_loss(loss_of(net, 0), optimizer) as scaled:
                scaled.backward()
                if iteration == 0:
                    net.bias.grad[0] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_closures() -> None:
    """Law: a closure is refused where losses are scaled, and runs where none is."""
    _, optimizer = start("O1")
    with pytest.raises(amp.AmpError, match=r"SGD.step was given a closure"):
        optimizer.step(lambda: None)
    _, optimizer = start("O0", loss_scale=1.0)
    assert optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("level", LEVELS)
def test_failed_pass(level: str) -> None:
    """Law: a pass that fails leaves the gradients from before it."""
    net, optimizer = start(level)
    backward(net, optimizer, 0)
    before = gradients(optimizer)

    def fail() -> None:
        with amp.scale_loss(loss_of(net, 1), optimizer) as scaled:
            scaled.backward()
            message = "out of memory"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert all(map(torch.equal, gradients(optimizer), before))
    assert STATE.handle is None or STATE.handle.is_active()


@pytest.mark.parametrize(
    ("kwargs", "first", "floor", "ceiling"),
    [
        ({}, 2.0**16, 1.0, 2.0**24),
        ({"min_loss_scale": 4096.0}, 2.0**16, 4096.0, 2.0**24),
        ({"min_loss_scale": 2.0**17}, 2.0**17, 2.0**17, 2.0**24),
        ({"max_loss_scale": 8.0}, 8.0, 1.0, 8.0),
        ({"max_loss_scale": 0.5}, 0.5, 0.5, 0.5),
    ],
)
def test_bounds_of_the_scale(
    kwargs: dict[str, float], first: float, floor: float, ceiling: float
) -> None:
    """Law: the first scale is 2**16, between the bounds; apex's had no floor."""
    start("O2", **kwargs)
    rule = STATE.loss_scalers[0].scaler.rule
    assert (rule.init_scale, rule.min_scale, rule.max_scale) == (first, floor, ceiling)


def test_collapse_is_loud() -> None:
    """Law: a scale that cannot help ends the run, where apex fell to 0 in silence."""
    net, optimizer = start("O2", max_loss_scale=8.0)

    def overflow() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(net, 0), optimizer) as scaled:
            scaled.backward()
            net.bias.grad[0] = torch.inf

    for _ in range(9):
        overflow()
        optimizer.step()
    with pytest.raises(hs.LossScaleCollapse) as caught:
        overflow()
    assert caught.value.inf_in == ("bias",)


def test_names_that_programs_set() -> None:
    """Law: apex's names of the scale and of its clean steps read and set both."""
    start("O1")
    (scaler,) = STATE.loss_scalers
    for name, value in (("_loss_scale", 64.0), ("_unskipped", 5)):
        setattr(scaler, name, value)
        assert getattr(scaler, name) == value
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 5}}


@pytest.mark.parametrize("level", LEVELS)
def test_clipping(level: str) -> None:
    """Law: clipping master_params clips what the optimizer uses."""
    net, optimizer = start(level)
    backward(net, optimizer, 0)
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.0**-6)
    norm = torch.stack([g.float().norm() for g in gradients(optimizer)]).norm()
    torch.testing.assert_close(norm, torch.tensor(2.0**-6), rtol=2.0**-8, atol=0)
    values = [g.abs().max() for g in gradients(optimizer)]
    assert all(value < 2.0**-5 for value in values)


def test_a_pass_outside_scale_loss() -> None:
    """Law: masters that no gradient reached refuse to step; a proper pass mends it."""
    net, optimizer = start("O2")
    before = net.weight.detach().clone()
    loss_of(net, 0).backward()
    with pytest.raises(amp.AmpError, match="never went through amp"):
        optimizer.step()
    assert torch.equal(net.weight, before)
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient: nothing to refuse
    backward(net, optimizer, 0)
    optimizer.step()
    assert not torch.equal(net.weight, before)
    optimizer.zero_grad()
    backward(net, optimizer, 0)
    # Another optimizer's pass may leave its own; this one's are there.
    loss_of(net, 1).backward()
    optimizer.step()

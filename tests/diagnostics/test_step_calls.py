"""`hs.diagnose` sees what a program calls: scalers, schedules, sums in 16 bits.

Programs that are wrong, each with its finding and its cure, are in tests/field.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.diagnostics.step_calls import CHECKED
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep.reporting.finding import Finding

SCALERS = {"torch": torch.amp.GradScaler, "halfstep": hs.GradScaler}


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant rates: to measure them is not what is tested here."""
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)


class Loop:
    """A small fp16 program, of which nobody tells `diagnose` anything."""

    def __init__(self, kind: str = "torch", scale: float = 256.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler: Any = SCALERS[kind]("cpu", init_scale=scale)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.x = torch.randn(16, 8)

    def backward(self) -> None:
        """Run a backward pass of a scaled loss."""
        with torch.autocast("cpu", torch.float16):
            loss = self.model(self.x).float().square().mean()
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """Step, and close the iteration."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self) -> None:
        """Make a step as torch's page on AMP does."""
        self.optimizer.zero_grad()
        self.backward()
        self.update()


def found(step: Callable[[], object]) -> list[Finding]:
    """Return what is said of the calls."""
    findings = hs.diagnose(step).findings
    return [each for each in findings if each.rule in CHECKED]


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_is_found(kind: str) -> None:
    """Law: a scaler counts though nobody gave it, and what was checked is listed."""
    diagnosis = hs.diagnose(Loop(kind).step)
    assert "no loss scale" not in {each.rule for each in diagnosis.findings}
    assert diagnosis.calls == ()
    assert diagnosis.numerics.scales == (256, 256)
    line = "No problem found in the first 3 steps with: calls of the loss scaler, loss"
    assert line in str(diagnosis).replace("\n", " ")


@pytest.mark.parametrize("kind", SCALERS)
def test_gradients_clipped_too_early(kind: str) -> None:
    """Law: the order of calls is looked at, and nothing is warned of besides."""
    loop = Loop(kind)

    def step() -> None:
        loop.optimizer.zero_grad()
        loop.backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
        loop.update()

    (finding,) = found(step)
    assert finding.rule == "call order"
    assert "before unscale_" in finding.measured
    assert "scaler.unscale_(optimizer) first" in finding.advice


@pytest.mark.parametrize("kind", SCALERS)
def test_two_scalers_in_a_step(kind: str) -> None:
    """Law: scalers that share a step are not taken for new ones in each step."""
    loop = Loop(kind)
    scalers = [loop.scaler, SCALERS[kind]("cpu", init_scale=256.0)]

    def step() -> None:
        for loop.scaler in scalers:
            loop.step()

    assert found(step) == []


def lerp(average: Tensor, weight: Tensor) -> None:
    """Average by one call."""
    average.lerp_(weight.to(average.dtype), 1e-4)


def multiply_add(average: Tensor, weight: Tensor) -> None:
    """Average as many programs do."""
    average.data.mul_(0.9999).add_(weight.data.to(average.dtype), alpha=1e-4)


def foreach(average: Tensor, weight: Tensor) -> None:
    """Average as torch's AveragedModel does."""
    torch._foreach_lerp_([average], [weight.to(average.dtype)], 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("average", [lerp, multiply_add, foreach])
def test_an_average_that_stands_still(
    dtype: torch.dtype, average: Callable[[Tensor, Tensor], None]
) -> None:
    """Law: of an average in 16 bits whose changes are rounded away it is told."""
    loop = Loop()
    copy = loop.model.weight.detach().to(dtype, copy=True)

    @torch.no_grad()
    def step() -> None:
        with torch.enable_grad():
            loop.step()
        average(copy, loop.model.weight)

    findings = found(step)
    assert [each.rule for each in findings] == ["16-bit sum"] * (dtype.itemsize < 4)
    assert all(each.where == "a tensor of shape (4, 8)" for each in findings)


def test_a_copy_in_16_bits_is_no_average() -> None:
    """Law: weights that are published, and sums that move, are not accused."""
    loop = Loop()
    copy = loop.model.weight.detach().bfloat16()
    total = torch.zeros((), dtype=torch.bfloat16)

    def step() -> None:
        loop.step()
        copy.copy_(loop.model.weight.detach())
        total.add_(1.0)

    assert found(step) == []


@pytest.mark.parametrize("sizes", [[1.0], [1.0] * 8, [256.0] + [1.0] * 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_added_in_16_bits(dtype: torch.dtype, sizes: list[float]) -> None:
    """Law: a sum that rounding spoils is told, one that it does not is not."""
    loop = Loop()
    model = nn.Linear(4, 1).to(dtype)

    def step() -> None:
        loop.step()
        model.zero_grad()
        for size in sizes:
            model(torch.full((1, 4), size, dtype=dtype)).sum().backward()

    spoilt = dtype == torch.bfloat16 and len(sizes) > 8
    findings = found(step)
    assert [each.rule for each in findings] == ["16-bit sum"] * spoilt
    assert all("those of 33 backward passes" in str(each) for each in findings)


@pytest.mark.parametrize("use", ["ratio", "ratio of floats", "cross entropy"])
def test_log_probabilities_in_16_bits(use: str) -> None:
    """Law: they are noted where they are compared, and not in a cross entropy."""
    loop = Loop()
    model = nn.Linear(4, 3)

    def step() -> None:
        loop.step()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.ones(2, 4))
        logp = (logits.float() if "floats" in use else logits).log_softmax(-1)
        if use == "cross entropy":
            nn.functional.nll_loss(logp, torch.tensor([0, 1])).backward()
        else:
            (logp - logp.detach()).exp().mean().backward()

    notes = [each for each in found(step) if each.rule == "log-probabilities"]
    assert [each.severity for each in notes] == ["note"] * (use == "ratio")


def test_a_mode_of_the_program() -> None:
    """Law: function modes that a step opens around its update are closed in order."""
    loop = Loop()

    def step() -> None:
        with torch.device("meta"):
            loop.x = torch.randn(16, 8, device="cpu")
            loop.step()
        assert torch.ones(1).device.type == "cpu"

    assert found(step) == []
    assert torch.ones(1).device.type == "cpu"


def test_masks_are_no_fault() -> None:
    """Law: -inf in a buffer, and inf that was there before, are as they were made."""
    loop = Loop()
    loop.model.register_buffer("mask", torch.full((4,), -math.inf))
    loop.model.register_buffer("lowest", torch.full((), math.inf))
    assert hs.diagnose(loop.step).numerics.buffers == ()
    assert hs.diagnose(loop.step, model=loop.model).numerics.buffers == ()


def test_nothing_stays_behind() -> None:
    """Law: classes, hooks, modes and the scaler's own watch are as they were."""
    loop = Loop("halfstep")
    own, classes = loop.scaler.call_order_watch, [*SCALERS.values()]
    gc.collect()  # the last session of earlier tests takes its patches with it
    before = [dict(vars(each)) for each in classes]
    modes = torch._C._len_torch_function_stack()

    def fail() -> None:
        loop.step()
        raise ArithmeticError

    for step in (loop.step, fail):
        with contextlib.suppress(ArithmeticError):
            hs.diagnose(step)
        gc.collect()
        assert loop.scaler.call_order_watch is own
        assert [dict(vars(each)) for each in classes] == before
        assert torch._C._len_torch_function_stack() == modes


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_an_eps_that_float16_does_not_hold(eps: float) -> None:
    """Law: it is told before the weights are NaN, and one that is held is not."""
    model = nn.Linear(8, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), eps=eps)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8).half()).float().square().mean().backward()
        optimizer.step()

    found = hs.diagnose(step, warmup=1, steps=1, profiled=1).findings
    told = [each for each in found if "its eps=1e-08 is 0" in each.measured]
    assert [each.where for each in told] == ["Adam"] * (eps == 1e-8)


def test_arguments_by_name() -> None:
    """Law: a scaler may be called with keywords."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loop.model(loop.x).float().square().mean()
        loop.scaler.scale(outputs=loss).backward()
        loop.scaler.unscale_(optimizer=loop.optimizer)
        loop.scaler.step(optimizer=loop.optimizer)
        loop.scaler.update(new_scale=None)

    assert found(step) == []


def test_a_scale_by_hand() -> None:
    """Law: a loss that the program multiplies by itself counts as scaled."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loop.model(loop.x).float().square().mean()
        (loss * 256.0).backward()
        for param in loop.model.parameters():
            param.grad /= 256.0
        loop.optimizer.step()

    assert "no loss scale" not in {each.rule for each in hs.diagnose(step).findings}


def test_a_model_beside_the_one_that_trains() -> None:
    """Law: what another thread runs without autocast is its own affair."""
    loop, other = Loop(), nn.Linear(8, 4)

    def step() -> None:
        thread = threading.Thread(target=lambda: other(torch.ones(2, 8)))
        thread.start()
        loop.step()
        thread.join()

    assert found(step) == []

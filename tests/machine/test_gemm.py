"""Rates of matmuls: formula, sizes, rounds."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from halfstep.machine import gemm
from halfstep.numerics.formats import FORMATS

RATES = {"fp32": 2.0, "bf16": 5.0, "fp16": 0.25}
SIZES = {"fp32": 1024, "bf16": 1024, "fp16": 256}
NAMES = {format_.dtype: format_.name for format_ in FORMATS.values()}


class Clock:
    """A clock that moves by the same step each time it is read."""

    def __init__(self, step: float) -> None:
        self.step, self.reads = step, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.reads * self.step


def test_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: 2 n**3 operations over the shortest time, and no more calls than needed.

    50 products fill 0.05 s, each between two readings; or three; or one that is slow.
    """
    for step, reads in ((0.001, 100), (0.03, 6), (5.0, 2)):
        clock = Clock(step)
        for name in ("perf_counter", "thread_time"):
            monkeypatch.setattr(time, name, clock)
        rate = gemm.gemm_rate(torch.float32, "cpu", 64)
        assert rate == pytest.approx(2 * 64**3 / step / 1e12, rel=1e-6)
        assert clock.reads == pytest.approx(reads, abs=2)


def test_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: n doubles while 8 times the time is expected to fit, up to the largest."""
    for step, size in ((0.001, 1024), (0.02, 256)):
        for name in ("perf_counter", "thread_time"):
            monkeypatch.setattr(time, name, Clock(step))
        assert gemm.gemm_size(torch.float32, "cpu") == size


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_other_devices(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: larger products than on a CPU are timed, each until the device is done."""
    waits: list[str] = []
    asked = SimpleNamespace(synchronize=lambda: waits.append(device))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: asked)
    tensor = torch.ones(1, 1)
    monkeypatch.setattr(torch, "ones", lambda *_size, **_options: tensor)
    clock = Clock(0.001)
    monkeypatch.setattr(time, "perf_counter", clock)
    assert gemm.gemm_size(torch.float32, device) == 4096
    assert len(waits) == clock.reads


def test_rounds_give_the_fastest_and_the_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: the fastest round is the rate, and the slowest of them the spread.

    Formats take turns, so that a slow moment meets all of them.
    """
    factors, asked = iter((0.9, 1.0, 0.95)), list[str]()

    def rate(dtype: torch.dtype, _device: str, size: int) -> float:
        assert size == SIZES[NAMES[dtype]]
        if len(asked) % 3 == 0:
            rate.factor = next(factors)  # type: ignore[attr-defined]
        asked.append(NAMES[dtype])
        return RATES[NAMES[dtype]] * rate.factor  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(gemm, "gemm_rate", rate)
    monkeypatch.setattr(gemm, "gemm_size", lambda dtype, _: SIZES[NAMES[dtype]])
    measured = gemm.measure("cpu")
    assert measured.rates == RATES
    assert measured.spread == pytest.approx(dict.fromkeys(RATES, 0.1))
    assert asked == [*RATES] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="other clocks are too coarse")
def test_waiting_for_a_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: on a CPU the time in which the thread computes is taken."""
    monkeypatch.setattr(time, "thread_time", Clock(0.001))
    monkeypatch.setattr(time, "perf_counter", Clock(5.0))
    rate = gemm.gemm_rate(torch.float32, "cpu", 64)
    assert rate == pytest.approx(2 * 64**3 / 0.001 / 1e12, rel=1e-6)

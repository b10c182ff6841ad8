"""Rates of matrix products: formula, sizes, rounds, and what load does to them."""

import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from halfstep.machine import cpu, gemm
from halfstep.numerics.formats import FORMATS

Measure = Callable[..., gemm.GemmRates]
RATES = {"fp32": 2.0, "bf16": 5.0, "fp16": 0.25}
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


class Rates:
    """A machine with the rates of each round, and what was asked of it."""

    def __init__(self, *of_rounds: float) -> None:
        self.factors: Iterator[float] = iter(of_rounds)
        self.factor = 1.0
        self.asked: list[tuple[str, int]] = []

    def __call__(self, dtype: torch.dtype, _device: str, size: int) -> float:
        name = NAMES[dtype]
        if name == "fp32" and len(self.asked) % 5 == 0:
            self.factor = next(self.factors)
        self.asked.append((name, size))
        return RATES[name] * self.factor * (1.0 if size == 256 else 0.5)


def size(dtype: torch.dtype, _device: str) -> int:
    return {"fp32": 1024, "bf16": 1024, "fp16": 256}[NAMES[dtype]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    def measured(rates: Rates, waited: float) -> gemm.GemmRates:
        monkeypatch.setattr(gemm, "gemm_rate", rates)
        monkeypatch.setattr(gemm, "gemm_size", size)
        monkeypatch.setattr(gemm, "count_waiting", lambda: lambda: waited)
        return gemm.measure("cpu")

    return measured


def test_rounds_give_the_fastest_and_the_spread(measure: Measure) -> None:
    """Law: the fastest round is the rate, and the slowest of them the spread.

    Of a small matmul and a large one the faster counts.
    """
    machine = Rates(0.9, 1.0, 0.95)
    found = measure(machine, 0.01)
    assert found.rates == RATES
    assert found.spread == pytest.approx(dict.fromkeys(RATES, 0.1))
    assert (found.waited, found.doubt) == (0.01, "")
    # In turn, so that a slow moment meets all of them.
    sizes = [("fp32", 256), ("fp32", 1024), ("bf16", 256), ("bf16", 1024)]
    turn = {*sizes, ("fp16", 256)}
    asked = [{*machine.asked[start : start + 5]} for start in (0, 5, 10)]
    assert asked == [turn] * 3


@pytest.mark.parametrize(
    ("waited", "doubt"),
    [(0.4, "threads waited 40% of the time for a CPU"), (0.0, "rounds differ by 50%")],
)
def test_what_was_measured_under_load_is_doubted(
    measure: Measure, waited: float, doubt: str
) -> None:
    """Law: rates are in doubt where threads waited, or where rounds differ."""
    found = measure(Rates(1.0, 0.5, 1.0), waited)
    assert (found.rates, found.doubt) == (RATES, doubt)


@pytest.mark.skipif(sys.platform != "linux", reason="other clocks are too coarse")
def test_waiting_for_a_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: on a CPU the time in which the thread computes is taken."""
    monkeypatch.setattr(time, "thread_time", Clock(0.001))
    monkeypatch.setattr(time, "perf_counter", Clock(5.0))
    rate = gemm.gemm_rate(torch.float32, "cpu", 64)
    assert rate == pytest.approx(2 * 64**3 / 0.001 / 1e12, rel=1e-6)


def test_share_of_the_thread_that_waited_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: seconds a thread waited over those that passed; without them, the load."""
    monkeypatch.setattr(gemm.time, "perf_counter", iter([10.0, 14.0]).__next__)
    told = iter([{1: 5.0, 2: 0.0}, {1: 6.0, 3: 2.0}])
    monkeypatch.setattr(cpu, "thread_wait_seconds", lambda: next(told))
    assert gemm.count_waiting()() == 0.5
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "thread_wait_seconds", lambda: None)
    monkeypatch.setattr(cpu, "affinity", lambda: (0, 1))
    for load, share in ((8.0, 0.75), (2.0, 0.0), (0.0, 0.0)):
        monkeypatch.setattr(
            gemm.os, "getloadavg", lambda load=load: (load, 0, 0), raising=False
        )
        assert gemm.count_waiting()() == share

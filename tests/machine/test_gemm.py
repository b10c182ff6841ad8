"""Rates of matrix products: formula, sizes, rounds, and what load does to them."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

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


def test_rate() -> None:
    """Law: 2 n**3 operations over the shortest time, and no more calls than needed.

    50 products fill 0.05 s, each between two readings; or three; or one that is slow.
    """
    for step, reads in ((0.001, 100), (0.03, 6), (5.0, 2)):
        clock = Clock(step)
        rate = gemm.gemm_rate(torch.float32, "cpu", 64, clock)
        assert rate == pytest.approx(2 * 64**3 / step / 1e12, rel=1e-6)
        assert clock.reads == pytest.approx(reads, abs=2)


def test_size() -> None:
    """Law: n doubles while 8 times the time is expected to fit, up to the largest."""
    for step, size in ((0.001, 1024), (0.02, 256)):
        clock = Clock(step)
        assert gemm.gemm_size(torch.float32, "cpu", clock) == size


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_other_devices(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: larger products than on a CPU are timed, each until the device is done."""
    waits: list[str] = []
    asked = SimpleNamespace(synchronize=lambda: waits.append(device))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: asked)
    tensor = torch.ones(1, 1)
    monkeypatch.setattr(torch, "ones", lambda *_size, **_options: tensor)
    clock = Clock(0.001)
    assert gemm.gemm_size(torch.float32, device, clock) == 4096
    assert len(waits) == clock.reads


def shares(*of_attempts: float) -> Callable[[], Callable[[], float]]:
    told = iter(of_attempts)

    def start() -> Callable[[], float]:
        share = next(told)
        return lambda: share

    return start


class Rates:
    """A machine with the rates of each round, and what was asked of it."""

    def __init__(self, *of_rounds: float) -> None:
        self.factors: Iterator[float] = iter(of_rounds)
        self.factor = 1.0
        self.asked: list[tuple[str, int, bool]] = []

    def __call__(
        self, dtype: torch.dtype, _device: str, size: int, clock: Any = None
    ) -> float:
        name, alone = NAMES[dtype], clock is time.thread_time
        if name == "fp32":
            self.factor = next(self.factors, 1.0)
        self.asked.append((name, size, alone))
        return RATES[name] * self.factor * (10 if alone else 1)


def size(dtype: torch.dtype, _device: str, _clock: Any = None) -> int:
    return {"fp32": 1024, "bf16": 1024, "fp16": 256}[NAMES[dtype]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    def measured(device: str, rates: Rates, *of_attempts: float) -> gemm.GemmRates:
        monkeypatch.setattr(gemm, "gemm_rate", rates)
        monkeypatch.setattr(gemm, "gemm_size", size)
        monkeypatch.setattr(gemm, "count_waiting", shares(*of_attempts))
        return gemm.measure(device)

    return measured


def test_rounds_give_the_fastest_and_the_spread(measure: Measure) -> None:
    """Law: the fastest round is the rate, and the slowest of them the spread."""
    machine = Rates(0.9, 1.0, 0.95)
    found = measure("cpu", machine, 0.01)
    assert found.rates == RATES
    assert found.spread == pytest.approx(dict.fromkeys(RATES, 0.1))
    assert (found.waited, found.doubt) == (0.01, "")
    # In turn, so that a slow moment meets all of them.
    one_round = [("fp32", 1024, False), ("bf16", 1024, False), ("fp16", 256, False)]
    assert machine.asked == 3 * one_round


def test_load_makes_it_measure_again(measure: Measure) -> None:
    """Law: an attempt under load, or with too large a spread, does not count."""
    machine = Rates(0.5, 0.6, 0.8, *[1.0] * 3)
    found = measure("cpu", machine, 0.3, 0, 0.0)
    assert found.rates == RATES
    assert found.doubt == ""
    # None under load, three with a spread of 3/8, three that count.
    assert len(machine.asked) == 3 * (0 + 3 + 3)


def test_what_was_never_quiet_is_doubted(measure: Measure) -> None:
    """Law: after three attempts the time the thread computed is used, and doubted."""
    machine = Rates()
    found = measure("cpu", machine, 0.3, 0.5, 0.4)
    assert found.rates == {name: 10 * rate for name, rate in RATES.items()}
    assert found.doubt == "threads waited 40% of the time for a CPU"
    assert all(alone for *_, alone in machine.asked)
    assert {size for name, size, _ in machine.asked if name == "bf16"} == {256, 1024}
    machine = Rates(*[1.0, 0.5, 1.0] * 3)
    found = measure("cuda", machine, 0, 0, 0)
    assert found.doubt == "rounds differ by 50%"
    assert not any(alone for *_, alone in machine.asked)  # a GPU has its own clock


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

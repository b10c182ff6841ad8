"""Rates of matrix products: formula, sizes, rounds, and what load does to them."""

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
        monkeypatch.setattr(time, "perf_counter", clock)
        rate = gemm.gemm_rate(torch.float32, "cpu", 64)
        assert rate == pytest.approx(2 * 64**3 / step / 1e12, rel=1e-6)
        assert clock.reads == pytest.approx(reads, abs=2)


def test_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: n doubles while 8 times the time is expected to fit, up to the largest."""
    for step, size in ((0.001, 1024), (0.02, 256)):
        monkeypatch.setattr(time, "perf_counter", Clock(step))
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
        self.asked: list[tuple[str, int]] = []

    def __call__(self, dtype: torch.dtype, _device: str, size: int) -> float:
        name = NAMES[dtype]
        if name == "fp32":
            self.factor = next(self.factors, 1.0)
        self.asked.append((name, size))
        return RATES[name] * self.factor


def size(dtype: torch.dtype, _device: str) -> int:
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
    assert machine.asked == 3 * [("fp32", 1024), ("bf16", 1024), ("fp16", 256)]


def test_load_makes_it_measure_again(measure: Measure) -> None:
    """Law: an attempt under load, or with too large a spread, does not count."""
    machine = Rates(*[0.5] * 3, 0.5, 0.6, 0.8)
    found = measure("cpu", machine, 0.3, 0.0, 0.0)
    assert (found.rates, found.doubt) == (RATES, "")
    assert len(machine.asked) == 3 * 3 * 3


@pytest.mark.parametrize(
    ("waited", "doubt"),
    [(0.4, "threads waited 40% of the time for a CPU"), (0.0, "rounds differ by 50%")],
)
def test_what_was_never_quiet_is_doubted(
    measure: Measure, waited: float, doubt: str
) -> None:
    """Law: after three attempts the rates are taken, with a doubt."""
    found = measure("cpu", Rates(*[1.0, 0.5, 1.0] * 3), 0.3, 0.5, waited)
    assert (found.rates, found.doubt) == (RATES, doubt)


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

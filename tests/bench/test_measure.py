"""Times, turns and notes of the benches."""

import time
from collections.abc import Callable

import pytest
import torch

from halfstep.bench import measure

TIMES = measure.Times({"ours": (2.0, 9.0, 40.0), "theirs": (1.0, 10.0, 8.0)})


def test_ratios_within_rounds() -> None:
    """Law: ratios are taken round by round, and the median last.

    Quartiles of the ratios 0.9, 2, 5 are 1.45 and 3.5.
    A candidate beside itself is at 1, without spread; one round has none.
    """
    assert (TIMES.median("ours"), TIMES.median("ours", 1e3)) == (9.0, 9000.0)
    assert TIMES.ratio("ours", "theirs") == 2.0
    assert TIMES.spread("ours", "theirs") == pytest.approx((3.5 - 1.45) / 2)
    assert (TIMES.ratio("ours", "ours"), TIMES.spread("ours", "ours")) == (1.0, 0.0)
    assert measure.Times({"a": (2.0,), "b": (4.0,)}).spread("a", "b") == 0.0


def test_one_that_did_not_run() -> None:
    """Law: of a candidate that did not run there is no figure, nor a verdict."""
    assert TIMES.median("x") is None
    for figure in (TIMES.ratio, TIMES.spread):
        assert figure("ours", "x") is figure("x", "ours") is None


def test_result() -> None:
    """Law: a difference within the spread is none; few rounds and itself give none.

    Ratios 2, 0.9 and 5 differ from 1 by 1 in the median, and spread by 1.025.
    """
    assert TIMES.result("ours", "theirs") == "no difference beyond the spread"
    assert TIMES.result("ours", "ours") is None
    clear = measure.Times({"a": (1.0, 2.0, 4.0), "b": (2.0, 4.0, 8.0)})
    assert clear.result("a", "b") == "faster"
    assert clear.result("b", "a") == "slower"
    assert measure.Times({"a": (1.0, 2.0), "b": (2.0, 4.0)}).result("a", "b") is None
    assert measure.verdict(0.25, 0.25) == "no difference beyond the spread"


def test_turns() -> None:
    """Law: each takes one turn a round, every second round in the opposite order."""
    order: list[str] = []

    def turn(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    times = measure.take_turns({name: turn(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert times.rounds == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the clock starts when the device is idle, and stops when it is again.

    A CPU is not waited for.
    """
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    ticks = iter((1.0, 3.5))

    def tick() -> float:
        events.append("clock")
        return next(ticks)

    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", tick)
        assert measure.timed(lambda: events.append("call"), "cuda") == (None, 2.5)
    assert events == ["wait", "clock", "call", "wait", "clock"]
    assert measure.timed(lambda: 7, "cpu")[0] == 7
    assert len(events) == 5

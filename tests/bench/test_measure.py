"""Times, turns and notes of the benches."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import pytest
import torch

from halfstep.bench import commands, measure
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable

TIMES = measure.Times({"ours": (2.0, 9.0, 40.0), "theirs": (1.0, 10.0, 8.0)})


def test_ratios_within_rounds() -> None:
    """Law: ratios and differences are taken round by round, and the median last.

    Ratios 2, 0.9, 5 and differences 1, -1, 32. Quartiles of 0.9, 2, 5 are 1.45 and 3.5.
    """
    assert TIMES.median("ours") == 9.0
    assert TIMES.ratio("ours", "theirs") == 2.0
    assert TIMES.excess("ours", "theirs") == 1.0
    assert TIMES.spread("ours", "theirs") == pytest.approx((3.5 - 1.45) / 2)


def test_a_baseline_is_one() -> None:
    """Law: a contender beside itself is at 1, without spread; one round has none."""
    assert TIMES.ratio("ours", "ours") == 1.0
    assert TIMES.spread("ours", "ours") == 0.0
    assert measure.Times({"a": (2.0,), "b": (4.0,)}).spread("a", "b") == 0.0


def test_turns() -> None:
    """Law: each takes one turn a round, every second round in the opposite order."""
    seen: list[str] = []

    def turn(name: str) -> Callable[[], float]:
        def run() -> float:
            seen.append(name)
            return float(len(seen))

        return run

    times = measure.take_turns({name: turn(name) for name in "abc"}, 3)
    assert "".join(seen) == "abccbaabc"
    assert times.rounds == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the clock starts when the device is idle, and stops when it is again."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    ticks = iter((1.0, 3.5))

    def tick() -> float:
        seen.append("clock")
        return next(ticks)

    monkeypatch.setattr(time, "perf_counter", tick)
    assert measure.timed(lambda: seen.append("call"), "cuda") == (None, 2.5)
    assert seen == ["wait", "clock", "call", "wait", "clock"]


def test_a_cpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without a GPU none is asked for."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("asked"))
    assert measure.timed(lambda: 7, "cpu")[0] == 7


def test_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: so many calls are made, and the time of one is the time over their number.

    The clock shows 10 seconds between its readings.
    """
    ticks = iter((0.0, 10.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    seen: list[int] = []
    assert measure.per_call(lambda: seen.append(0), 4, "cpu") == 2.5
    assert len(seen) == 4


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: no word means the machine's device; cuda without CUDA is refused."""
    assert measure.pick_device(None) == hardware.capabilities().device
    assert measure.pick_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "--device cuda: torch sees no CUDA device here; use --device cpu."
    with pytest.raises(UserError) as caught:
        measure.pick_device("cuda")
    assert str(caught.value) == message


def test_a_process_that_fails() -> None:
    """Law: a contender that fails is told of with its status and its last words."""
    with pytest.raises(UserError) as caught:
        measure.run_in_subprocess("json.tool", {"no": "file"})
    start = "contender {'no': 'file'} failed with status "
    assert str(caught.value).startswith(start)
    assert "No such file or directory" in str(caught.value)


WORDS = {
    "autocast": ["--sizes", "3,5", "--dtype", "fp16", "--device", "cpu"],
    "accumulate": ["--layers", "2", "--rounds", "4", "--device", "cpu"],
    "encoder": ["--dropout", "0.25", "--heads", "1", "--device", "cpu"],
}


@pytest.mark.parametrize("bench", WORDS)
def test_the_command_repeats_the_run(bench: str) -> None:
    """Law: the command in the notes, read again, gives the very same settings."""
    parser = argparse.ArgumentParser()
    commands.BENCHES[bench].add_flags(parser)
    given = parser.parse_args(WORDS[bench])
    when_where, command = measure.conditions(bench, "cpu", given)
    start = f"halfstep bench {bench} "
    assert command.startswith(start)
    assert parser.parse_args(command.removeprefix(start).split()) == given
    facts = hardware.capabilities()
    for word in (time.strftime("%Y-"), f"torch {torch.__version__}", facts.cpu):
        assert word in when_where
    assert when_where.endswith(f", threads: {torch.get_num_threads()}")


def test_tunables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what changes the allocator for all contenders stands in the notes."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    notes = measure.conditions("autocast", "cpu", argparse.Namespace())
    assert notes[-1] == "GLIBC_TUNABLES=glibc.malloc.mmap_max=0"

"""The tests themselves: they ask no clock, and hold on any CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import NUMERIC

from halfstep.machine import hardware

TESTS = Path(__file__).parent
CLOCKS = re.compile(r"\b(perf_counter|monotonic|process_time)(_ns)?\(\)|getrusage\(")
NOT_JUDGED = {
    *("planted_faults.py", "test_tests.py", "test_kills.py", "thread_soak.py"),
}
"""No result depends on it: how long something runs, or when it is killed."""


def test_no_test_asks_the_clock() -> None:
    """Law: no test reads a clock, or what the process has used of the machine."""
    asking = {
        path.name
        for path in TESTS.rglob("*.py")
        if CLOCKS.search(path.read_text(encoding="utf-8"))
    }
    assert asking - NOT_JUDGED == set()


def test_numeric_files_are_there() -> None:
    """Law: each file that is to be run under lesser instruction sets is a file."""
    assert {
        path.relative_to(TESTS).with_suffix("").as_posix()
        for path in TESTS.rglob("test_*.py")
    } >= NUMERIC


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_format_is_slow_here(dtype: str) -> None:
    """Law: whatever CPU the tests run on, no format is called slow, nor worth less."""
    assert hardware.emulation_warning(dtype) is None
    assert hardware.recommend("cpu").dtype == "bf16"

"""The tests themselves: they ask no clock, hold on any CPU, and use public names."""

import ast
import atexit
import os
import re
import sys
from pathlib import Path

import forks
import messages
import pytest
import ranks
import torch
from accelerate.state import AcceleratorState
from process_starts import starts
from tests.conftest import NUMERIC
from torch import nn

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


PRIVATE_ACCESSES = 41
"""May only become less: what is private holds no wall in place."""
OTHERS = (
    AcceleratorState,
    torch.amp.GradScaler("cpu"),
    torch.library.Library,
    torch.nn.modules.module,
    torch.ones(1).to_sparse_coo(),
    torch.ops.aten.add.Tensor,
    torch.optim.SGD([torch.ones(1)]),
    nn.Module(),
    atexit,
    os,
    sys,
)
"""Whose private names are not ours, whatever a test calls them."""


def private_accesses(path: Path) -> int:
    return sum(
        isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr) is not None
        and not re.match(r"(self|cls|torch|F|nn|dist)(\.|$)", ast.unparse(node.value))
        and not any(hasattr(other, node.attr) for other in OTHERS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_private_access_becomes_less() -> None:
    """Law: tests use public names; what they do not yet is counted, and shrinks."""
    assert sum(map(private_accesses, TESTS.rglob("*.py"))) <= PRIVATE_ACCESSES


def test_numeric_files_are_there() -> None:
    """Law: each file that is to be run under lesser instruction sets is a file."""
    assert {
        path.relative_to(TESTS).with_suffix("").as_posix()
        for path in TESTS.rglob("test_*.py")
    } >= NUMERIC


def test_starts_of_processes_are_seen() -> None:
    """Law: what starts a process is told from what does not, through helpers, too."""
    assert all(map(starts, (forks.run_ranks, ranks.start, os.fork)))
    assert not any(map(starts, (ranks.net, private_accesses, os.getpid)))


def test_messages_on_file_have_a_test() -> None:
    """Law: no wording is kept of a test that is gone."""
    for test in messages.read():
        path, name = test.partition("[")[0].split("::")
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_format_is_slow_here(dtype: str) -> None:
    """Law: whatever CPU the tests run on, no format is called slow, nor worth less."""
    assert hardware.emulation_warning(dtype) is None
    assert hardware.recommend("cpu").dtype == "bf16"

"""The CPU: what a process may use of it, from files that look like the system's."""

import os
from pathlib import Path

import pytest

from halfstep.machine import cpu


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu, "PROC", tmp_path / "proc")
    return tmp_path


def test_waits_of_threads(system: Path) -> None:
    """Law: schedstat's second number is nanoseconds a thread waited; none is None."""
    assert cpu.thread_wait_seconds() is None
    write(system / "proc" / "self" / "task", {"7/schedstat": "5 2000000000 9\n"})
    (system / "proc" / "self" / "task" / "8").mkdir()  # a thread that ends just now
    assert cpu.thread_wait_seconds() == {7: 2.0}


def test_limits_of_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: those that are set now."""
    for name in cpu.INSTRUCTION_LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert cpu.instruction_limits() == {}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_CBWR", "")
    assert cpu.instruction_limits() == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_affinity_is_what_the_process_may_use() -> None:
    """Law: a process that is confined to a processor has that one."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system confines no process to a processor")
    before = os.sched_getaffinity(0)
    assert cpu.affinity() == tuple(sorted(before))
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu.affinity() == (min(before),)
    finally:
        os.sched_setaffinity(0, before)

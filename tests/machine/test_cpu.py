"""The CPU: what a process may use of it."""

import os

import pytest

from halfstep.machine import cpu


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

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
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path / "cgroup")
    return tmp_path


LIMITS = {
    "version 2": ("0::/job\n", {"job/cpu.max": "150000 100000\n"}, 1.5),
    "the least of all above": (
        "0::/a/b\n",
        {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "max 1"},
        0.5,
    ),
    "a container's own root": ("0::/host/path\n", {"cpu.max": "400000 100000\n"}, 4.0),
    "version 1": (
        "5:memory:/m\n4:cpu,cpuacct:/job\n",
        {
            "cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "memory/m/cpu.max": "1 100",
        },
        2.0,
    ),
    "version 1, unlimited": (
        "1:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "no controller": ("0::/\n", {}, None),
    "no cgroups": (None, {}, None),
}


@pytest.mark.parametrize(("groups", "files", "limit"), LIMITS.values(), ids=LIMITS)
def test_cgroup_limit(
    groups: str | None, files: dict[str, str], limit: float | None, system: Path
) -> None:
    """Law: the least quota over period of a process's group and of those above it."""
    write(system / "cgroup", files)
    if groups is not None:
        write(system / "proc", {"self/cgroup": groups})
    assert cpu.cgroup_limit() == limit


def test_waits_of_threads(system: Path) -> None:
    """Law: schedstat's second number is nanoseconds a thread waited; none is None."""
    assert cpu.thread_wait_seconds() is None
    write(system / "proc" / "self" / "task", {"7/schedstat": "5 2000000000 9\n"})
    (system / "proc" / "self" / "task" / "8").mkdir()  # a thread that ends just now
    assert cpu.thread_wait_seconds() == {7: 2.0}


def test_limits_of_instructions(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is set now, and what was set at the start, are told apart."""
    for name in cpu.INSTRUCTION_LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert cpu.instruction_limits() == {}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_CBWR", "")
    assert cpu.instruction_limits() == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    start = "HOME=/h\0ATEN_CPU_CAPABILITY=avx2\0ODD\0"
    write(system / "proc", {"self/environ": start})
    assert cpu.first_instruction_limits() == {"ATEN_CPU_CAPABILITY": "avx2"}


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

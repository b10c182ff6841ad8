"""The machine: what is read, what is measured once, and the advice that follows."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from halfstep import formats, machine
from halfstep.formats import FORMATS
from halfstep.machine import Capabilities, Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("measured_rates")

RATES = {"fp32": 2.0, "bf16": 5.0, "fp16": 0.25}
AMX = Capabilities("a processor", 8, 4, ("AVX512", "AMX-BF16"), (), "2.99")
CARD = Gpu("a card", (7, 5), 2**34)


# Reading


CPUINFO_X86 = """\
processor\t: 0
model name\t: A Xeon: the model
flags\t\t: fpu sse2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
CPUINFO_ARM = "processor\t: 0\nFeatures\t: fp asimdhp bf16\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("text", "name", "sets"),
    [
        (CPUINFO_X86, "A Xeon: the model", ("AVX512", "AVX512-BF16", "AMX-BF16")),
        (CPUINFO_ARM, "an architecture", ("NEON-FP16", "NEON-BF16")),
        ("", "an architecture", ()),
        (None, "an architecture", ()),
    ],
    ids=["x86", "arm", "empty", "absent"],
)
def test_cpu_is_read(
    text: str | None,
    name: str,
    sets: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: the first processor's name and flags, and nothing made up without them."""
    listing = tmp_path / "cpuinfo"
    if text is not None:
        listing.write_text(text, encoding="utf-8")
    monkeypatch.setattr(machine, "Path", lambda _path: listing)
    monkeypatch.setattr(platform, "machine", lambda: "an architecture")
    monkeypatch.setattr(platform, "processor", lambda: "")
    found = machine.capabilities.__wrapped__()
    assert (found.cpu, found.instruction_sets) == (name, sets)


def test_capabilities_of_this_machine() -> None:
    """Law: threads, torch and GPUs are torch's own words; a GPU is preferred."""
    found = machine.capabilities.__wrapped__()
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.cores >= 1
    assert (AMX.device, replace(AMX, gpus=(CARD,)).device) == ("cpu", "cuda")


def test_peak_memory_counts_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the peak is the system's figure, and the unit is the byte."""
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  9 kB\nVmHWM:\t  3 kB\n", encoding="ascii")
    monkeypatch.setattr(machine, "Path", lambda _path: status)
    assert machine.peak_memory("cpu") == 3072


# Measuring


class Clock:
    """A clock that moves by the same step each time it is read."""

    def __init__(self, step: float) -> None:
        self.step, self.reads = step, 0

    def perf_counter(self) -> float:
        """Return the time."""
        self.reads += 1
        return self.reads * self.step


@pytest.mark.parametrize(("step", "size"), [(0.001, 1024), (0.02, 256), (5.0, 256)])
def test_measured_rate(step: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: 2 n**3 operations over the time; n grows only while time allows."""
    clock = Clock(step)
    monkeypatch.setattr(machine, "time", clock)
    rate = machine.measure_gemm(torch.float32, "cpu", seconds=0.1)
    assert rate == pytest.approx(2 * size**3 / step / 1e12, rel=1e-6)
    if step > 1:
        # One product at the start, one measured: an emulated format is given up.
        assert clock.reads == 3


@pytest.fixture(autouse=True)
def _forget_planted_rates() -> Iterator[None]:
    """Keep what this file plants from every other test."""
    yield
    machine._gemm_rates.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Plant a machine whose cache is empty; list what is measured on it."""
    calls: list[str] = []
    names = {format_.dtype: format_.name for format_ in FORMATS.values()}

    def measure(dtype: torch.dtype, _device: str) -> float:
        calls.append(names[dtype])
        return RATES[names[dtype]]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "capabilities", lambda: AMX)
    monkeypatch.setattr(machine, "measure_gemm", measure)
    new_process()
    return calls


def new_process() -> None:
    """Forget what only the process knows."""
    machine._gemm_rates.cache_clear()


def store(tmp_path: Path) -> Path:
    """Return where the rates are kept."""
    return tmp_path / "halfstep" / "machine.json"


def test_rates_are_measured_once(measured: list[str], tmp_path: Path) -> None:
    """Law: one measurement a machine; the process and the file both remember."""
    assert machine.gemm_rates() == RATES
    assert machine.gemm_rates("cpu") == RATES
    assert measured == ["fp32", "bf16", "fp16"]
    new_process()
    assert machine.gemm_rates() == RATES
    assert measured == ["fp32", "bf16", "fp16"]
    assert [file.name for file in store(tmp_path).parent.iterdir()] == ["machine.json"]


def test_another_machine_is_measured_anew(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: processor, torch and threads each make the figures new; none are lost."""
    machine.gemm_rates()
    others = [
        Capabilities("another", 8, 4, (), (), "2.99"),
        Capabilities("a processor", 8, 1, (), (), "2.99"),
        Capabilities("a processor", 8, 4, (), (), "3.0"),
    ]
    for number, other in enumerate(others, 2):
        monkeypatch.setattr(machine, "capabilities", lambda other=other: other)
        machine.gemm_rates()
        assert len(measured) == 3 * number
    new_process()
    monkeypatch.setattr(machine, "capabilities", lambda: AMX)
    machine.gemm_rates()
    assert len(measured) == 3 * 4


def test_the_answer_is_a_copy(measured: list[str]) -> None:
    """Law: who changes the answer changes nobody else's."""
    machine.gemm_rates()["fp32"] = 0.0
    assert machine.gemm_rates() == RATES
    assert len(measured) == 3


def test_refresh_measures_each_time(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: `refresh` measures whenever it is asked to, and the new figures stay."""
    machine.gemm_rates()
    machine.gemm_rates(refresh=True)
    assert len(measured) == 6
    faster = {name: 2 * rate for name, rate in RATES.items()}
    monkeypatch.setattr(
        machine,
        "measure_gemm",
        lambda dtype, _device: 2 * RATES[formats.parse(dtype).name],
    )
    assert machine.gemm_rates(refresh=True) == faster
    assert machine.gemm_rates() == faster
    new_process()
    assert machine.gemm_rates() == faster


BROKEN = [
    b"",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"null",
    b'{"KEY": 1}',
    b'{"KEY": {"fp32": "fast", "bf16": 1, "fp16": 1}}',
    b'{"KEY": {"fp32": null, "bf16": 1, "fp16": 1}}',
    b'{"KEY": {"fp32": 1.0}}',
    b'{"KEY": {"fp32": 0, "bf16": 1, "fp16": 1}}',
    b'{"KEY": {"fp32": NaN, "bf16": 1, "fp16": 1}}',
    b'{"KEY": {"fp32": 1, "bf16": Infinity, "fp16": 1}}',
    b'{"KEY": {"fp32": 1, "bf16": -1, "fp16": 1}}',
]


@pytest.mark.parametrize("content", BROKEN)
def test_broken_cache_is_replaced(
    content: bytes, measured: list[str], tmp_path: Path
) -> None:
    """Law: a cache that holds anything but rates counts as empty, and is mended."""
    machine.gemm_rates()
    key = next(iter(json.loads(store(tmp_path).read_text(encoding="utf-8"))))
    assert key == "cpu|a processor|torch 2.99|4 threads"
    store(tmp_path).write_bytes(content.replace(b"KEY", key.encode()))
    for _ in range(2):
        new_process()
        assert machine.gemm_rates() == RATES
    assert len(measured) == 6


def test_unwritable_cache_is_harmless(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where nothing can be kept, figures are measured once in each process."""
    (tmp_path / "file").touch()
    # A path through a file can be made by nobody, not even by root.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for processes in (1, 2):
        new_process()
        assert machine.gemm_rates() == machine.gemm_rates() == RATES
        assert len(measured) == 3 * processes


def test_cache_lives_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: XDG_CACHE_HOME, and without it (or empty) ~/.cache, hold the figures."""
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert machine._cache_file() == Path("/elsewhere/halfstep/machine.json")
    for gone in (monkeypatch.delenv, lambda name: monkeypatch.setenv(name, "")):
        gone("XDG_CACHE_HOME")
        assert machine._cache_file() == Path("/somebody/.cache/halfstep/machine.json")


@pytest.mark.gpu
def test_gpu_is_measured() -> None:
    """Law: on a real GPU every format has a positive, finite rate."""
    found = machine.gemm_rates("cuda", refresh=True)
    assert found.keys() == FORMATS.keys()
    assert all(0 < rate < math.inf for rate in found.values())


KEEP = """
import ctypes
import torch
from halfstep import machine

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks "
                "uordblks fordblks keepcost".split()]

def mapped():
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = Mallinfo
    return mallinfo().arena + mallinfo().hblkhd

def freed():
    held = torch.ones(16 * 2**20)
    before = mapped()
    del held
    return before - mapped()

print(freed(), machine.keep_memory(), freed())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_memory_is_kept_when_asked() -> None:
    """Law: a large tensor's memory goes back to the system, until memory is kept."""
    done = subprocess.run(
        [sys.executable, "-c", KEEP], capture_output=True, text=True, check=True
    )
    before, kept, after = done.stdout.split()
    assert int(before) >= 64 * 2**20
    assert (kept, after) == ("True", "0")

"""The machine: what is read of it, and its memory."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import run_forked

from halfstep.machine import Capabilities, Gpu, cpu, hardware

AMX = Capabilities("a processor", 8, 4, ("AVX512", "AMX-BF16"), (), "2.99")
CARD = Gpu("a card", (7, 5), 2**34)


# Reading


CPUINFO_X86 = """\
processor\t: 0
model name\t: A Xeon: the model
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
X86_SETS = ("AVX2", "AVX512", "AVX512-BF16", "AMX-BF16")
CPUINFO_ARM = "processor\t: 0\nFeatures\t: fp asimdhp bf16\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("text", "name", "sets"),
    [
        (CPUINFO_X86, "A Xeon: the model", X86_SETS),
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
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    monkeypatch.setattr(cpu, "PROC", tmp_path)
    monkeypatch.setattr(cpu, "facts", cpu.facts.__wrapped__)
    monkeypatch.setattr(platform, "machine", lambda: "an architecture")
    monkeypatch.setattr(platform, "processor", lambda: "")
    found = hardware.capabilities.__wrapped__()
    assert (found.cpu, found.instruction_sets) == (name, sets)


def test_capabilities_of_this_machine() -> None:
    """Law: threads, torch and GPUs are torch's own words; a GPU is preferred."""
    found = hardware.capabilities.__wrapped__()
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.cores >= 1
    assert (AMX.device, replace(AMX, gpus=(CARD,)).device) == ("cpu", "cuda")


# Memory


KEEP = """
import torch
from halfstep import machine
from malloc import mapped

def freed():
    held = torch.ones(16 * 2**20)
    before = mapped()
    del held
    return before - mapped()

print(freed(), machine.keep_memory(), freed())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_memory_is_kept_when_asked(tmp_path: Path) -> None:
    """Law: a large tensor's memory goes back to the system, until memory is kept."""
    (tmp_path / "keep.py").write_text(KEEP)
    (done,) = run_forked(str(tmp_path / "keep.py"))
    before, kept, after = done.stdout.split()
    assert int(before) >= 64 * 2**20
    assert (kept, after) == ("True", "0")

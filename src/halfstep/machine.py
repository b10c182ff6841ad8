"""What this machine can do, read from the system and measured.

In: nothing, or a device. Out: `Capabilities` (processor, instruction sets, GPUs),
matrix-product rates, and the level and dtype that follow from them, with the reason.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep import formats
from halfstep.report import Cell, Table

CPU_FLAGS = {
    "avx512f": "AVX512",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "asimdhp": "NEON-FP16",
    "bf16": "NEON-BF16",
}
"""Linux's word for an instruction set that matters to 16-bit training -> its name."""

_NATIVE = {
    "bf16": ("AVX512-BF16", "AMX-BF16", "NEON-BF16"),
    "fp16": ("AVX512-FP16", "AMX-FP16", "NEON-FP16"),
}

WORTH_IT = 1.5
"""Least measured rate over fp32's for which a 16-bit format is recommended. A guess:
casts and everything that is not a matrix product must be paid from the difference."""

SLOWER = 0.9
"""Measured rate over fp32's below which a format counts as slower: two formats that
are equally fast differ by a few per cent from one measurement to the next."""

_BF16_CAPABILITY = (8, 0)
_FP16_CAPABILITY = (7, 0)


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    capability: tuple[int, int]
    """CUDA compute capability: 7.0 and later have fp16 tensor cores, 8.0 bf16 too."""
    memory_bytes: int


@dataclass(frozen=True)
class Capabilities:
    """What the machine is; nothing here is measured."""

    cpu: str
    cores: int
    """Processors this process may run on."""
    threads: int
    """Threads torch uses inside one operation."""
    instruction_sets: tuple[str, ...]
    """Those of `CPU_FLAGS` that the system lists; empty where it lists none."""
    gpus: tuple[Gpu, ...]
    torch: str

    @property
    def device(self) -> str:
        """The device that training uses unless told otherwise."""
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class Recommendation:
    """A level and a dtype, with the reason."""

    level: str
    dtype: str
    reason: str


@functools.cache
def capabilities() -> Capabilities:
    """Return what this machine is; read once a process."""
    model, flags = _read_cpu()
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(facts.name, (facts.major, facts.minor), facts.total_memory))
    return Capabilities(
        cpu=model,
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        instruction_sets=tuple(
            name for flag, name in CPU_FLAGS.items() if flag in flags
        ),
        gpus=tuple(gpus),
        torch=torch.__version__,
    )


def _read_cpu() -> tuple[str, frozenset[str]]:
    """Return the processor's name and its flags, as far as the system tells."""
    source = Path("/proc/cpuinfo")
    if not source.exists():
        return platform.processor() or platform.machine(), frozenset()
    facts: dict[str, str] = {}
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.machine()
    return name, frozenset((facts.get("flags") or facts.get("Features") or "").split())


def gemm_rates(device: str | None = None, *, refresh: bool = False) -> dict[str, float]:
    """Return the matrix-product rate of each format, in TFLOP/s.

    Why: instruction sets say what a processor has, not what torch makes of it. The
    same flags gave fp16 twice fp32's rate on one machine and a tenth of it on another.

    The figures are kept in the user's cache folder, by processor, torch version and
    number of threads; where that folder cannot be written, they are measured again
    in each process (a fraction of a second).

    Args:
        device: "cpu" or "cuda"; default the one that training would use.
        refresh: Measure again although figures are kept.
    """
    where = device or capabilities().device
    machine = capabilities()
    chip = machine.gpus[0].name if where == "cuda" else machine.cpu
    key = f"{where}|{chip}|torch {machine.torch}|{machine.threads} threads"
    if refresh:
        _gemm_rates.cache_clear()
    return dict(_gemm_rates(where, key, refresh=refresh))


@functools.cache
def _gemm_rates(device: str, key: str, *, refresh: bool) -> dict[str, float]:
    store = _cache_file()
    kept = _read_cache(store)
    known = kept.get(key, {})
    usable = all(0 < rate < math.inf for rate in known.values())
    if known.keys() == formats.FORMATS.keys() and usable and not refresh:
        return known
    rates = {
        name: measure_gemm(format_.dtype, device)
        for name, format_ in formats.FORMATS.items()
    }
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        part = store.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(kept | {key: rates}, indent=1), encoding="utf-8")
        part.replace(store)
    except OSError:
        # A cache is a convenience: without it the figures are measured once a process.
        return rates
    return rates


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "halfstep" / "machine.json"


def _read_cache(store: Path) -> dict[str, dict[str, float]]:
    """Return what is kept; anything unreadable counts as nothing kept."""
    try:
        found = json.loads(store.read_text(encoding="utf-8"))
        return {
            key: {name: float(rate) for name, rate in rates.items()}
            for key, rates in found.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def measure_gemm(dtype: torch.dtype, device: str, *, seconds: float = 0.1) -> float:
    """Return the rate of a square matrix product, in TFLOP/s.

    Formula: 2 n**3 operations over the shortest time of one product: whatever else
    the machine does only adds to it. n grows from 256 while a product is expected to
    fit the time, so that a format which the processor emulates does not take minutes.

    Args:
        dtype: Dtype of both factors.
        device: "cpu" or "cuda".
        seconds: Time to spend on the last size. Default 0.1: some sixty products
            of the fastest format on a 2-core machine.
    """
    largest = 4096 if device == "cuda" else 1024
    size, rate = 256, 0.0
    while True:
        left = torch.ones(size, size, dtype=dtype, device=device)
        times: list[float] = []
        start = time.perf_counter()
        left @ left
        while len(times) < 3 or time.perf_counter() - start < seconds / 2:  # noqa: PLR2004
            _wait(device)
            began = time.perf_counter()
            left @ left
            _wait(device)
            times.append(time.perf_counter() - began)
            if times[-1] > seconds:
                break
        shortest = min(times)
        rate = 2 * size**3 / shortest / 1e12
        if size == largest or shortest * 8 > seconds:
            return rate
        size *= 2


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def gain(dtype: str, device: str | None = None) -> float:
    """Return the measured matrix-product rate of a format over fp32's."""
    rates = gemm_rates(device)
    return rates[dtype] / rates["fp32"]


def native(dtype: str, device: str | None = None) -> str:
    """Return what makes a 16-bit format fast here, or "" where nothing is known to."""
    if dtype not in _NATIVE:
        return ""
    machine = capabilities()
    if (device or machine.device) == "cuda":
        least = _BF16_CAPABILITY if dtype == "bf16" else _FP16_CAPABILITY
        has = machine.gpus[0].capability
        return f"compute capability {has[0]}.{has[1]}" if has >= least else ""
    return ", ".join(
        name for name in _NATIVE[dtype] if name in machine.instruction_sets
    )


def recommend(device: str | None = None) -> Recommendation:
    """Return the level and dtype to train with here, and why.

    bf16 is preferred: it needs no loss scale. fp16 is recommended only on a GPU on
    which bf16 is not worth it.
    """
    where = device or capabilities().device
    candidates = ("bf16", "fp16") if where == "cuda" else ("bf16",)
    for dtype in candidates:
        means, times = native(dtype, where), gain(dtype, where)
        if times >= WORTH_IT and (means or where == "cpu"):
            by = f" ({means})" if means else ""
            reason = f"{dtype} matrix products run {times:.1f} times as fast as fp32"
            return Recommendation("O2", dtype, f"{reason} on this {where}{by}")
    reason = (
        f"bf16 matrix products run at {gain('bf16', where):.2f} of fp32's rate on this "
        f"{where} ({native('bf16', where) or 'no bf16 instructions'}); {WORTH_IT} is "
        "the least that pays for the casts"
    )
    return Recommendation("O0", "fp32", reason)


def emulation_warning(dtype: str, device: str | None = None) -> str | None:
    """Return what a 16-bit format costs where this machine is slower in it, or None."""
    where = device or capabilities().device
    if dtype == "fp32" or gain(dtype, where) >= SLOWER:
        return None
    rates = gemm_rates(where)
    means = native(dtype, where)
    cause = f"although it has {means}" if means else "it has no instructions for it"
    return (
        f"dtype={dtype}: this {where} runs {dtype} matrix products at "
        f"{rates[dtype]:.3f} TFLOP/s, fp32 at {rates['fp32']:.3f} ({cause}): expect "
        f"{rates['fp32'] / rates[dtype]:.1f} times the time. Use --level O0."
    )


def peak_memory(device: str | torch.device) -> int:
    """Return the most memory this process has held so far, in bytes.

    On a CPU the resident set, as the system counts it (0 where it does not tell); on
    a GPU what torch allocated on it.
    """
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.max_memory_allocated(where))
    status = Path("/proc/self/status")
    if status.exists():
        # What `getrusage` tells begins with the peak of whoever started this process.
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""Names of glibc's `mallopt`, from its malloc.h."""


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, for the next tensor on a CPU.

    Why: glibc maps each tensor of 32 MiB or more afresh and gives it back at once, and
    the system clears every page of it again. A training step on large layers can
    spend half of its time on that. The price is that memory once used stays with
    the process. It concerns the whole process, so nothing here calls it unasked.

    Returns:
        Whether the C library can: it must be glibc.
    """
    library = ctypes.CDLL(None) if platform.system() == "Linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_MMAP_MAX, 0)
    return bool(kept and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def tables(*, refresh: bool = False) -> tuple[Table, ...]:
    """Return the machine, its measured rates, and the advice, as tables.

    Args:
        refresh: Measure again although figures are kept.
    """
    facts = capabilities()
    found: list[tuple[Cell, ...]] = [
        ("processor", facts.cpu),
        ("cores", str(facts.cores)),
        ("torch", f"{facts.torch}, {facts.threads} threads"),
        ("instruction sets", ", ".join(facts.instruction_sets) or "none known"),
    ]
    for gpu in facts.gpus:
        gibibytes = gpu.memory_bytes / 2**30
        major, minor = gpu.capability
        about = f"{gpu.name}, compute capability {major}.{minor}, {gibibytes:.0f} GiB"
        found.append(("GPU", about))
    rates: list[tuple[Cell, ...]] = []
    for where in dict.fromkeys((facts.device, "cpu")):
        measured = gemm_rates(where, refresh=refresh)
        rates += [
            (where, name, rate, rate / measured["fp32"], native(name, where) or "-")
            for name, rate in measured.items()
        ]
    advice = recommend()
    columns = ("device", "format", "TFLOP/s", "x fp32", "hardware for it")
    return (
        Table("Machine", ("what", "value"), tuple(found)),
        Table("Matrix products, measured", columns, tuple(rates)),
        Table(
            "Advice",
            ("level", "dtype", "why"),
            ((advice.level, advice.dtype, advice.reason),),
        ),
    )

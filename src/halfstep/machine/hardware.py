"""Detects this machine's hardware, and recommends a level and a dtype.

What the hardware lacks decides first: a format without instructions is not measured.
What it has must then prove fast, since instruction sets do not tell what torch makes of
them: the same flags gave fp16 twice fp32's rate on one machine and a tenth of it on
another, and the environment may limit them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import platform
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from halfstep.errors import UserError
from halfstep.machine import cpu, gemm, rate_cache
from halfstep.machine.gemm import GemmRates
from halfstep.numerics import formats
from halfstep.reporting.table import Cell, Report, Table, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU_FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "asimd": "NEON",
    "asimdhp": "NEON-FP16",
    "bf16": "NEON-BF16",
}
"""Linux's name of an instruction set of matmuls -> common name."""

_NATIVE = {
    "bf16": ("AVX512-BF16", "AMX-BF16", "NEON-BF16"),
    "fp16": ("AVX512-FP16", "AMX-FP16", "NEON-FP16"),
}

WORTH_IT = 1.5
"""Least measured rate relative to fp32's for which a 16-bit format is recommended. An
estimate: the difference must pay for casts and all ops that are not matmuls."""

SLOWER = 0.9
"""Measured rate relative to fp32's below which a format counts as slower; rates of
equally fast formats differ by a few percent between measurements."""

_BF16_CAPABILITY = (8, 0)
_FP16_CAPABILITY = (7, 0)


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    """Name of the device."""
    capability: tuple[int, int]
    """CUDA compute capability: 7.0 and later have fp16 tensor cores, 8.0 bf16 too."""
    memory_bytes: int


@dataclass(frozen=True)
class Capabilities(Report):
    """The hardware of this machine, without measurements."""

    cpu: str
    """Name of the CPU."""
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
class Recommendation(Report):
    """A level and a dtype, with the reason."""

    level: str
    dtype: str
    reason: str


@functools.cache
def capabilities() -> Capabilities:
    """Return the hardware of this machine; it is read once per process.

    Example:
        >>> capabilities().device in ("cpu", "cuda")
        True
    """
    fields = cpu.facts()
    flags = cpu.flags(fields)
    # Without /proc/cpuinfo, platform may know the name; on Linux it adds nothing.
    other = "" if fields else platform.processor()
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(facts.name, (facts.major, facts.minor), facts.total_memory))
    return Capabilities(
        cpu=fields.get("model name") or other or platform.machine(),
        cores=len(cpu.affinity()),
        threads=torch.get_num_threads(),
        instruction_sets=tuple(
            name for flag, name in CPU_FLAGS.items() if flag in flags
        ),
        gpus=tuple(gpus),
        torch=torch.__version__,
    )


def pick_device(name: str | None) -> str:
    """Resolve a --device flag; None and "auto": cuda if available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch sees no CUDA device here; use --device cpu."
        )
    return capabilities().device if name in (None, "auto") else name


def gemm_rates(device: str | None = None, *, refresh: bool = False) -> dict[str, float]:
    """Return the matmul rate of each format, in TFLOP/s.

    The first call measures for some seconds; results are cached on disk.

    Args:
        device: "cpu", "cuda", "mps" or "xpu". Default: the one that training would use.
        refresh: Measure again, and ignore the cache.

    Example:
        >>> sorted(gemm_rates("cpu"))
        ['bf16', 'fp16', 'fp32']
    """
    return dict(measured_rates(device, refresh=refresh).rates)


def measured_rates(device: str | None = None, *, refresh: bool = False) -> GemmRates:
    """Return the matmul rates with their spread and age.

    They are cached in the user's cache directory, by `cache_key`.

    Raises:
        UserError: If `HALFSTEP_RATES` is set to invalid rates.
    """
    where = device or capabilities().device
    rates = _rates_from_environment(where)
    if rates is not None:
        return rates
    key = cache_key(where)
    with _measure_lock:  # two concurrent measurements would disturb each other
        rates = None if refresh else _process_rates.get(key) or rate_cache.load(key)
        if rates is None:
            rates = gemm.measure(where)
            try:
                rate_cache.save(key, rates)
            except OSError as error:
                why = f"the cache folder cannot be written: {error}"
                rates = replace(rates, why_not_cached=why)
        _process_rates[key] = rates
    return rates


def cache_key(device: str) -> str:
    """Return the key under which measurements of a device are cached now."""
    machine = capabilities()
    chip = f"{machine.cpu} {machine.instruction_sets}"
    if device == "cuda":
        chip = machine.gpus[0].name
    return rate_cache.key(device, chip, time.time())


_measure_lock = threading.Lock()
_process_rates: dict[str, GemmRates] = {}

_VARIABLE = "HALFSTEP_RATES"


def _rates_from_environment(device: str) -> GemmRates | None:
    """Return the rates of a device in HALFSTEP_RATES, or None."""
    word = os.environ.get(_VARIABLE)
    if not word:
        return None
    try:
        data = json.loads(word).get(device)
        if data is None:
            return None
        rates = {name: float(data[name]) for name in formats.FORMATS}
        if not all(0 < rate < math.inf for rate in rates.values()):
            raise ValueError(rates)  # noqa: TRY301 -- as bad as a word
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(
            f"{_VARIABLE}={word!r} holds no rates; it must look like "
            '{"cpu": {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}}, in TFLOP/s. Unset it '
            "to measure them."
        ) from error
    why = f"set by {_VARIABLE}"
    return GemmRates(rates, dict.fromkeys(rates, 0.0), why_not_cached=why)


def native(dtype: str, device: str | None = None) -> str:
    """Return the hardware feature that speeds up a 16-bit format, or "" if unknown."""
    if dtype not in _NATIVE:
        return ""
    machine = capabilities()
    where = device or machine.device
    if where == "cuda":
        least = _BF16_CAPABILITY if dtype == "bf16" else _FP16_CAPABILITY
        has = machine.gpus[0].capability
        return f"compute capability {has[0]}.{has[1]}" if has >= least else ""
    if where != "cpu":
        return ""
    return ", ".join(
        name for name in _NATIVE[dtype] if name in machine.instruction_sets
    )


def lacks(dtype: str, device: str) -> bool:
    """Return whether a device is known to have no instructions for a 16-bit format."""
    if os.environ.get(_VARIABLE):  # the rates may be another machine's
        return False
    is_clear = device == "cuda" or (device == "cpu" and capabilities().instruction_sets)
    return bool(is_clear) and not native(dtype, device)


def _feature(dtype: str, device: str) -> str:
    """Return `native` in brackets, with environment variables that may disable it."""
    if lacks(dtype, device):
        return f" (no {dtype} instructions)"
    means, limits = native(dtype, device), cpu.instruction_limits()
    if means and limits and device == "cpu":
        means = f"{means}, limited by {_spelled(limits)}"
    return f" ({means})" if means else ""


def _spelled(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def recommend(device: str | None = None) -> Recommendation:
    """Return the level and dtype to train with on this machine, and why.

    bf16 is preferred, since it needs no loss scale. fp16 is recommended only on a GPU
    where bf16 is not faster than fp32. A format without instructions is not measured.

    Args:
        device: "cpu", "cuda", "mps" or "xpu". Default: the one that training would use.

    Example:
        >>> recommend("cpu").level in ("O0", "O2")
        True
    """
    where = device or capabilities().device
    reasons = []
    for dtype in ("bf16", "fp16") if where == "cuda" else ("bf16",):
        if lacks(dtype, where):
            reasons.append(f"this {where} has no {dtype} instructions")
            continue
        rates, feature = gemm_rates(where), _feature(dtype, where)
        times = rates[dtype] / rates["fp32"]
        if times >= WORTH_IT:
            reason = f"{dtype} matmuls run {times:.1f} times as fast as fp32"
            return Recommendation("O2", dtype, f"{reason} on this {where}{feature}")
        reasons.append(
            f"{dtype} matmuls run at {times:.2f} of fp32's rate on this {where}"
            f"{feature}; {WORTH_IT} is the least that pays for the casts"
        )
    return Recommendation("O0", "fp32", "; ".join(reasons))


def emulation_warning(dtype: str, device: str | None = None) -> str | None:
    """Return a warning if a 16-bit format is slower than fp32 here, or None."""
    where = device or capabilities().device
    if dtype == "fp32":
        return None
    rates = gemm_rates(where)
    if rates[dtype] / rates["fp32"] >= SLOWER:
        return None
    better = recommend(where)
    is_fp32 = better.dtype == "fp32"
    advice = f"level {better.level}" if is_fp32 else f"dtype={better.dtype!r}"
    return (
        f"dtype={dtype}: this {where} runs {dtype} matmuls at "
        f"{rates[dtype]:.3f} TFLOP/s, fp32 at {rates['fp32']:.3f}"
        f"{_feature(dtype, where)}: expect "
        f"{rates['fp32'] / rates[dtype]:.1f} times the time. Use {advice}."
    )


def peak_memory(device: str | torch.device) -> int:
    """Return the peak memory of this process, in bytes.

    On a CPU the resident set size, 0 if the system does not provide it; on a GPU what
    torch allocated on it.
    """
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.max_memory_allocated(where))
    peak = cpu.memory("VmHWM")
    if peak is not None:  # the peak of `getrusage` starts from the parent process's
        return peak
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""Parameters of glibc's `mallopt`, from malloc.h."""


def keep_memory() -> bool:
    """Let this process reuse the CPU memory that it frees, for the next tensors.

    glibc maps each tensor of 32 MiB or more anew and returns it at once, and the system
    clears every page each time; a training step on large layers can spend half of its
    time on that. With this the process keeps the memory until it ends. It affects the
    whole process, so halfstep never calls it by itself.

    Returns:
        Whether it had an effect: the C library must be glibc.
    """
    library = ctypes.CDLL(None) if platform.system() == "Linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    changed = library.mallopt(_MMAP_MAX, 0)
    return bool(changed and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def machine_table() -> Table:
    """Return what this machine has, as a table."""
    facts = capabilities()
    rows: list[tuple[Cell, ...]] = [
        ("processor", facts.cpu),
        ("cores", str(facts.cores)),
        ("Python", platform.python_version()),
        ("torch", f"{facts.torch}, {format_count(facts.threads, 'thread')}"),
        ("instruction sets", ", ".join(facts.instruction_sets) or "none known"),
    ]
    if limits := cpu.instruction_limits():
        rows.append(("instruction limits", _spelled(limits)))
    for gpu in facts.gpus:
        gibibytes = gpu.memory_bytes / 2**30
        major, minor = gpu.capability
        about = f"{gpu.name}, compute capability {major}.{minor}, {gibibytes:.0f} GiB"
        rows.append(("GPU", about))
    return Table("Machine", ("what", "value"), tuple(rows))


def tables(*, refresh: bool = False) -> tuple[Table, ...]:
    """Return the machine, its measured rates, and the recommendation, as tables."""
    rows: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    for where in dict.fromkeys((capabilities().device, "cpu")):
        gemms = measured_rates(where, refresh=refresh)
        fp32 = gemms.rates["fp32"]
        day = "-"
        if gemms.time:
            day = time.strftime("%Y-%m-%d", time.localtime(gemms.time))
        for name, rate in gemms.rates.items():
            spread, means = gemms.spread[name], native(name, where) or "-"
            rows.append((where, name, rate, rate / fp32, spread, day, means))
        if gemms.why_not_cached:
            notes.append(f"{where}: not cached: {gemms.why_not_cached}.")
    advice = recommend()
    columns = ("device", "format", "TFLOP/s", "x fp32", "spread", "measured")
    rates_columns = (*columns, "hardware for it")
    row = (advice.level, advice.dtype, advice.reason)
    return (
        machine_table(),
        Table("Matmul rates, measured", rates_columns, tuple(rows), tuple(notes)),
        Table("Advice", ("level", "dtype", "why"), (row,)),
    )

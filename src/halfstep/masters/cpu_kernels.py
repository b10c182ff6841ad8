"""Optimizer updates in C, compiled on first use; one call updates a list of tensors.

`available` returns whether the kernels could be compiled, `describe` why not.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import deque
from dataclasses import dataclass
from functools import cache, partial
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep._torch.profiler_marks import UPDATE, record_range
from halfstep.errors import UserError
from halfstep.masters import c_compiler
from halfstep.masters.fused_step import (
    FLOATS,
    Adam,
    ParamUpdate,
    Rule,
    Sgd,
    checked_tensors,
    readable_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCE = Path(__file__).with_name("kernels.c")

# The same values as in kernels.c.
ENCODING_CODES = {"plain": 0, "fp32": 1, "split": 3, "kahan": 4, "stochastic": 5}
DTYPES = {dtype: code for code, dtype in enumerate(FLOATS)}
MAXIMIZE, NESTEROV, DECOUPLED, AMSGRAD, MOMENTUM, ADAM = (1 << bit for bit in range(6))
STATES = 3

_LONG = 0xFFFFFFFFFFFFFFFF
_CPU = torch.device("cpu")


def available() -> bool:
    """Return whether compiled kernels exist; the first call may compile them."""
    return _kernels()[0] is not None


def describe() -> str:
    """Return one line about the compiler, or why there are no kernels."""
    return _kernels()[1]


_RUNTIME = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""Entry points of GNU OpenMP, which the runtimes of LLVM and Intel export too."""


def runtime() -> tuple[int, ...] | None:
    """Return addresses of `_RUNTIME` in torch's OpenMP runtime; None if it has none.

    Why: a second runtime would start its own threads, which compete with torch's. The
    symbols are looked up as for torch, in the process first, then in torch's library;
    nothing is linked, so one compiled file works with any build of torch.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu"
    for name in (None, f"{library}.so", f"{library}.dylib"):
        try:
            loaded = ctypes.CDLL(name)
            entries = [getattr(loaded, entry) for entry in _RUNTIME]
        except (OSError, AttributeError):
            continue
        return tuple(ctypes.cast(e, ctypes.c_void_p).value or 0 for e in entries)
    return None


@dataclass(frozen=True)
class Kernels:
    """The loaded library and the threads to run it on."""

    library: ctypes.CDLL
    threads: tuple[int, ...] | None

    def __post_init__(self) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        library = self.library
        update, check = library.halfstep_update, library.halfstep_check_finite
        update.argtypes = [address, number, address, number, number, address, address]
        update.restype = None
        check.argtypes = [address, number, number, address, address, address]
        check.restype = ctypes.c_int32

    def team(self) -> array[int]:
        """Return `Threads` of kernels.c, with torch's current number of threads."""
        if self.threads is None:
            return array("q", (0, 0, 0, 1))
        return array("q", (*self.threads, torch.get_num_threads()))


@torch.no_grad()
def update(
    items: Sequence[ParamUpdate],
    rule: Rule,
    encoding: str,
    *,
    inverse: Tensor,
    clock: tuple[int, int],
    counters: list[Tensor] | tuple[()] = (),
    kernels: Kernels | None = None,
) -> None:
    """Update parameters on the CPU in place: see `fused_step.Kernel`.

    C does not increment version counters of tensors; the caller does, for autograd. It
    gets the table, `struct Numbers` and the flags that kernels.c reads.
    """
    with record_range(UPDATE):
        kernels = kernels or _require_kernels()
        # Keep these alive until the call returns: C only gets addresses.
        tensors = checked_tensors(items, rule, encoding, _CPU)
        is_sgd = isinstance(rule, Sgd)
        codes = [DTYPES[gradient.dtype] for gradient in tensors.gradients]
        if encoding == "fp32":
            pairs = zip(codes, tensors.weights, strict=True)
            codes = [code | DTYPES[weight.dtype] << 2 for code, weight in pairs]
        weights, residuals, *states, steps = tensors.addresses
        gradients = [*map(Tensor.data_ptr, tensors.gradients)]
        states += [[]] * (STATES - len(states))
        # One word per item in each column. Lists grow faster than arrays.
        words = list(tensors.numels)
        for column in (weights, gradients, residuals, *states, steps):
            words += column or [0] * len(items)
        words += [i.param_index << 1 | (is_sgd and i.is_first_step) for i in items]
        table = array("q", [*words, *codes])
        flags = MAXIMIZE * rule.maximize
        if isinstance(rule, Sgd):
            flags |= NESTEROV * rule.nesterov | MOMENTUM * (rule.momentum != 0)
            own = (0.0, rule.momentum, rule.dampening)
        else:
            flags |= ADAM | DECOUPLED * rule.decoupled | AMSGRAD * rule.amsgrad
            own = (rule.eps, rule.beta1, rule.beta2)
        numbers = array("d", [float(inverse), rule.lr, rule.weight_decay, *own])
        random_words = array("Q", [number & _LONG for number in clock])
        run = partial(
            kernels.library.halfstep_update,
            table.buffer_info()[0],
            len(items),
            numbers.buffer_info()[0],
            flags,
            ENCODING_CODES[encoding],
            random_words.buffer_info()[0],
            (team := kernels.team()).buffer_info()[0],
        )
        count = [partial(torch._foreach_add_, counters, 1.0)] if counters else []
        # One instruction: Ctrl-C comes before both, or after both.
        deque(map(call, [*count, run]), maxlen=0)
        del tensors, team


@torch.no_grad()
def check_finite(
    gradients: Sequence[Tensor], *, norm: bool, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor | None]:
    """Check gradients on the CPU: see `fused_step.Kernel`."""
    with record_range(UPDATE):
        kernels = kernels or _require_kernels()
        gradients = readable_gradients(gradients, _CPU)
        codes = [DTYPES[gradient.dtype] for gradient in gradients]
        pointers = map(Tensor.data_ptr, gradients)
        table = array("q", [*map(Tensor.numel, gradients), *pointers, *codes])
        found_inf = torch.zeros((), dtype=torch.float32, device=_CPU)
        total = torch.zeros((), dtype=torch.float64, device=_CPU)
        failed = kernels.library.halfstep_check_finite(
            table.buffer_info()[0],
            len(gradients),
            int(norm),
            found_inf.data_ptr(),
            total.data_ptr(),
            (team := kernels.team()).buffer_info()[0],
        )
        del team
    if failed:
        raise MemoryError
    return found_inf, total if norm else None


@cache
def _kernels() -> tuple[Kernels | None, str]:
    """Return the kernels, or None, and one line that describes them."""
    try:
        compiler = c_compiler.find()
        job = c_compiler.CompiledLibrary(SOURCE, works)
        library, remark = job.load_or_compile(compiler)
    except c_compiler.NoLibraryError as error:
        return None, f"not compiled: {error}"
    kernels = Kernels(library, runtime())
    threads = "threads of torch's OpenMP"
    if kernels.threads is None:
        threads = "one thread, as torch has no OpenMP"
    parts = (f"compiled with {compiler.version}", threads, remark)
    return kernels, ", ".join(part for part in parts if part)


@cache
def _require_kernels() -> Kernels:
    kernels, why = _kernels()
    if kernels is None:
        raise UserError(f"There are no compiled kernels ({why}).")
    return kernels


def works(library: ctypes.CDLL) -> bool:
    """Return whether the library handles subnormals and NaN, which flags may break."""

    def make(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    tiny = 2.0**-140
    weight, gradient = make(1.0, 2.0, -4.0, 2 * tiny), make(2.0, 2.0, 4.0, 8 * tiny)
    item = ParamUpdate(weight, gradient)
    sgd = Sgd(0.25, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
    kernels = Kernels(library, runtime())
    half, one = make(0.5), make(1.0)
    update([item], sgd, "plain", inverse=half, clock=(0, 0), kernels=kernels)
    found_inf, total = check_finite([weight], norm=True, kernels=kernels)
    last = 0.0 if c_compiler.flushes_subnormals() else tiny
    is_right = weight.tolist() == [0.75, 1.75, -4.5, last]
    is_right &= not found_inf and bool(total == 0.75**2 + 1.75**2 + 4.5**2)
    item.gradient, item.step = make(1.0, math.nan, 1.0, 1.0), make(1.0)
    item.states = gradient * 0, gradient * 0, make(1.0, 1.0, math.nan, 1.0)
    adam = Adam(0.25, 0.5, 0.5, 1.0, 0.0, decoupled=False, amsgrad=True, maximize=False)
    update([item], adam, "plain", inverse=one, clock=(0, 0), kernels=kernels)
    return is_right and item.states[2].isnan().tolist() == [False, True, True, False]

"""Computes 16-bit matrix products in fp32 where the CPU has no fast ones of its own.

With AVX2 alone, torch multiplies 16-bit matrices element by element: up to fifty times
as slowly as in fp32. For programs whose kernels no test is about; not by a dispatch
mode, which they could see.
"""

import warnings
from typing import Any

import torch
from torch import DispatchKeySet, Tensor
from torch.library import Library, get_kernel

NAMES = ("mm", "addmm", "bmm", "baddbmm")
LOW = (torch.bfloat16, torch.float16)
_library = Library("aten", "IMPL")


def _widen(name: str) -> None:
    kernel = get_kernel(f"aten::{name}", "CPU")

    def in_fp32(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Tensor:
        dtype = args[0].dtype
        if dtype not in LOW or any(
            isinstance(arg, Tensor) and arg.dtype is not dtype for arg in args
        ):
            return kernel.call_boxed(keyset, *args, **kwargs)
        wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
        return kernel.call_boxed(keyset, *wide, **kwargs).to(dtype)

    _library.impl(name, in_fp32, "CPU", with_keyset=True)


def install() -> None:
    """Do so until this process ends."""
    if torch.backends.cpu.get_cpu_capability() not in {"DEFAULT", "AVX2"}:
        return
    with warnings.catch_warnings():  # that torch's own kernels are replaced
        warnings.simplefilter("ignore", UserWarning)
        for name in NAMES:
            _widen(name)

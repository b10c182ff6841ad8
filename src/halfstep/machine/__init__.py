"""Measures what this machine can do, and recommends a level and dtype for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.machine.gemm import GemmRates
    from halfstep.machine.hardware import (
        Capabilities,
        Gpu,
        Recommendation,
        capabilities,
        gemm_rates,
        keep_memory,
        recommend,
    )

__all__ = [
    "Capabilities",
    "GemmRates",
    "Gpu",
    "Recommendation",
    "capabilities",
    "gemm_rates",
    "keep_memory",
    "recommend",
]

if not TYPE_CHECKING:  # type checkers must still report misspelled names

    def __getattr__(name: str) -> object:
        """Import a public name on first use; some submodules are used without torch."""
        if name in __all__:
            from halfstep.machine import gemm, hardware

            module = hardware if hasattr(hardware, name) else gemm
            return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What this machine can do, measured, and which level and dtype to use on it."""

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

if not TYPE_CHECKING:  # a type checker must still see a misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name on first use: submodules are used without torch."""
        if name in __all__:
            from halfstep.machine import gemm, hardware

            module = hardware if hasattr(hardware, name) else gemm
            return getattr(module, name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)

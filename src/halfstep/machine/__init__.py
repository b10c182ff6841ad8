"""Measures what this machine can do, and recommends a level and dtype for it."""

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

"""The shortest time that this machine allows a training step, from measured rates."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halfstep.bench import measure
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Iterator

_COPY_BYTES = 2**28
_COPIES = 5


@dataclass(frozen=True)
class Floor:
    """The measured rates of a device.

    Formula: floor = FLOPs of the matmuls and convolutions / matmul rate in the dtype
    + bytes of weights and optimizer state / copy rate.
    """

    tflops: dict[str, float]
    """Format -> TFLOP/s of a large matmul, by `hs.machine.gemm_rates`."""
    copy_gbytes: float
    """GB/s at which a tensor is copied: it is read once and written once."""

    @classmethod
    def measure(cls, device: str) -> Floor:
        """Measure the rates of a device."""
        rates = hardware.gemm_rates(device)
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.ones_like(source)
        times = [
            measure.timed(lambda: target.copy_(source), device)[1]
            for _ in range(_COPIES)
        ]
        return cls(rates, _COPY_BYTES / min(times) / 1e9)

    def ms(self, dtype: str, flops: float, state_bytes: float) -> float:
        """Return the milliseconds of matmuls in a dtype and a pass over the state."""
        seconds = flops / (self.tflops[dtype] * 1e12)
        return 1e3 * (seconds + state_bytes / (self.copy_gbytes * 1e9))

    def notes(self, gflop: str, of: str = "step") -> list[str]:
        """Return what the columns "floor", "of floor" and "MFU" mean."""
        if gflop == "0":
            return ["floor -: no candidate that ran shows the FLOPs of its passes"]
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in self.tflops.items())
        return [
            (
                "floor: matmuls and convolutions at the measured matmul rate of their "
                "format, and in each step one pass over weights and optimizer state "
                "at the copy rate"
            ),
            "of floor: its share of the measured time; MFU: of the matmuls alone",
            (
                f"{gflop} GFLOP a {of}; TFLOP/s: {rates}; "
                f"copy: {self.copy_gbytes:.3g} GB/s"
            ),
        ]


@contextlib.contextmanager
def counting_flops() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of matmuls and convolutions, those of attention included."""
    counter = FlopCounterMode(display=False)
    # It knows no FLOPs of the CPU's flash attention.
    with counter, sdpa_kernel(SDPBackend.MATH):
        yield counter

"""Statistics of a tensor as plain values, for reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from halfstep.numerics.formats import FloatFormat


@dataclass(frozen=True)
class TensorSummary:
    """Counts of one tensor at one step."""

    dtype: str
    """Name of the tensor's format, such as "fp16"."""
    count: int
    zeros: int
    infs: int
    nans: int
    amax: float
    """Largest finite magnitude; 0 if there is none."""
    exponents: Mapping[int, int]
    """floor(log2(abs(x))) -> number of finite non-zero values with that exponent."""
    casts: Mapping[str, float | None]
    """Format name -> signal-to-noise ratio of a cast to it in dB; None: no signal."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TensorSummary:
        """Return the summary that `TensorStats.data()` describes."""
        return cls(
            dtype=_format_word(data["dtype"]),
            count=int(data["count"]),
            zeros=int(data["zeros"]),
            infs=int(data["infs"]),
            nans=int(data["nans"]),
            amax=float(data["amax"]),
            exponents={int(e): int(n) for e, n in data["exponents"].items() if n},
            casts={
                _format_word(name): _sqnr(cast["signal"], cast["noise"])
                for name, cast in data["casts"].items()
            },
        )


def _format_word(dtype: str) -> str:
    """Return halfstep's name of a format, or torch's if halfstep has none."""
    try:
        return formats.parse(dtype).name
    except UserError:
        return dtype


def _sqnr(signal: float | None, noise: float | None) -> float | None:
    """Return the ratio in dB of the sums of squares of values and of their errors."""
    if not signal or noise is None:
        return None
    return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf


@dataclass(frozen=True)
class Sample:
    """A summary with its step and scale."""

    step: int
    summary: TensorSummary
    scale: float = 1.0
    """Factor on the values: for gradients, the loss scale."""


def underflow_exponent(format_: FloatFormat) -> int:
    """Return the exponent below which a format flushes to zero."""
    return math.frexp(format_.min_subnormal)[1] - 2


def max_exponent(format_: FloatFormat) -> int:
    """Return the exponent of a format's largest number."""
    return math.frexp(format_.max)[1] - 1


def merged(samples: Iterable[Sample], scale: float | None = None) -> Counter[int]:
    """Return one histogram of all samples, unchanged or rescaled to one loss scale.

    Scales are powers of two, so rescaling only shifts exponents.
    """
    total: Counter[int] = Counter()
    for sample in samples:
        moved = round(math.log2(scale / sample.scale)) if scale else 0
        for power, count in sample.summary.exponents.items():
            total[power + moved] += count
    return total


def share_below(histogram: Mapping[int, int], power: int) -> float:
    """Return the share of the values that are below 2**power."""
    total = sum(histogram.values())
    num_below = sum(count for e, count in histogram.items() if e < power)
    return num_below / total if total else 0.0


def flushed_share(samples: Iterable[Sample], format_: FloatFormat) -> float:
    """Return an estimate of the share of values that their own format flushed to zero.

    Small values are about as dense below the underflow threshold as above it, and the
    format's smallest number stands for an interval twice as wide as the one that is
    flushed. If values are denser below, the estimate is too low.
    """
    num_flushed = total = 0.0
    for sample in samples:
        summary = sample.summary
        last = summary.exponents.get(underflow_exponent(format_) + 1, 0)
        estimate = min(float(summary.zeros), last / 2)
        num_flushed += estimate
        total += estimate + sum(summary.exponents.values())
    return num_flushed / total if total else 0.0

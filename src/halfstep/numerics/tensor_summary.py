"""Statistics of a tensor as plain values, for reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.reporting import json_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from halfstep.numerics.formats import FloatFormat

_LOWEST, _HIGHEST = -1100, 1100  # fp64's range of exponents


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
    def from_data(cls, data: object) -> TensorSummary:
        """Return the summary that `TensorStats.data()` describes.

        Raises:
            UserError: If `data` has another structure.
        """
        fields = json_fields.mapping(data, "statistics")
        exponents = json_fields.mapping(fields.get("exponents", {}), "exponents")
        casts = json_fields.mapping(fields.get("casts", {}), "casts")
        return cls(
            _format_word(json_fields.optional_text(fields, "dtype") or "unknown"),
            json_fields.integer(fields, "count"),
            json_fields.integer(fields, "zeros", 0),
            json_fields.integer(fields, "infs", 0),
            json_fields.integer(fields, "nans", 0),
            json_fields.non_negative(fields, "amax"),
            {
                _power_of_two(power): json_fields.integer(exponents, power)
                for power in exponents
                if exponents[power]
            },
            {
                _format_word(name): _sqnr(json_fields.mapping(cast, name))
                for name, cast in casts.items()
            },
        )


def _format_word(dtype: str) -> str:
    """Return halfstep's name of a format, or torch's if halfstep has none."""
    try:
        return formats.parse(dtype).name
    except UserError:
        return dtype


def _sqnr(cast: Mapping[str, Any]) -> float | None:
    """Return the ratio in dB of the sums of squares of values and of their errors."""
    signal = json_fields.real(cast.get("signal", 0.0), "signal")
    noise = json_fields.real(cast.get("noise", 0.0), "noise")
    if not 0 < signal < math.inf or not 0 <= noise < math.inf:
        return None
    return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf


def _power_of_two(text: str) -> int:
    try:
        power = int(text)
    except ValueError:
        power = _HIGHEST + 1
    if not _LOWEST <= power <= _HIGHEST:
        message = f"'exponents' has the key {text[:20]!r}; keys are powers of two."
        raise UserError(message)
    return power


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

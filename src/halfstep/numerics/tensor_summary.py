"""What a tensor's numbers were like, as plain values.

In: `TensorStats.data()`, perhaps from a file. Out: a `Tally`, whose histogram tells
what a format and a loss scale make of the numbers.
"""

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

_LOWEST, _HIGHEST = -1100, 1100  # no format has powers of two beyond fp64's


@dataclass(frozen=True)
class CastTally:
    """What a cast to a format would do to the numbers."""

    flushed: int
    """Other than zero before, zero after."""
    saturated: int
    """Finite before, not after."""
    signal: float
    """Sum of squares of the numbers."""
    noise: float
    """Sum of squares of what rounding changes in them."""

    @property
    def sqnr(self) -> float | None:
        """Signal over noise in decibels; None where there is no signal to speak of."""
        if not 0 < self.signal < math.inf or not 0 <= self.noise < math.inf:
            return None
        if not self.noise:
            return math.inf
        return 10 * (math.log10(self.signal) - math.log10(self.noise))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CastTally:
        """Return what `data` tells."""
        return cls(
            json_fields.whole(data, "flushed", 0),
            json_fields.whole(data, "saturated", 0),
            json_fields.real(data.get("signal", 0.0), "signal"),
            json_fields.real(data.get("noise", 0.0), "noise"),
        )


@dataclass(frozen=True)
class Tally:
    """The numbers of one tensor at one step, counted."""

    dtype: str
    """Word of the format that they were in, such as "fp16"."""
    count: int
    zeros: int
    infs: int
    nans: int
    amax: float
    """Largest finite magnitude; 0 where there is none."""
    amin: float
    """Smallest finite magnitude other than 0; 0 where there is none."""
    exponents: Mapping[int, int]
    """floor(log2(abs(x))) -> how many finite numbers other than zero have it."""
    casts: Mapping[str, CastTally]
    """Word of a format -> what a cast to it would do."""

    @classmethod
    def from_data(cls, data: object) -> Tally:
        """Return what `TensorStats.data()` tells.

        Raises:
            UserError: If it is nothing of the kind.
        """
        told = json_fields.mapping(data, "statistics")
        exponents = json_fields.mapping(told.get("exponents", {}), "exponents")
        casts = json_fields.mapping(told.get("casts", {}), "casts")
        return cls(
            _format_word(json_fields.word(told, "dtype") or "unknown"),
            json_fields.whole(told, "count"),
            json_fields.whole(told, "zeros", 0),
            json_fields.whole(told, "infs", 0),
            json_fields.whole(told, "nans", 0),
            json_fields.amount(told, "amax"),
            json_fields.amount(told, "amin"),
            {
                _power(power): json_fields.whole(exponents, power)
                for power in exponents
                if exponents[power]
            },
            {
                _format_word(name): CastTally.from_data(json_fields.mapping(cast, name))
                for name, cast in casts.items()
            },
        )


def _format_word(dtype: str) -> str:
    """Return our word for a format, torch's for one that is none of ours."""
    try:
        return formats.parse(dtype).name
    except UserError:
        return dtype


def _power(text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        found = _HIGHEST + 1
    if not _LOWEST <= found <= _HIGHEST:
        message = f"'exponents' has the key {text[:20]!r}; keys are powers of two."
        raise UserError(message)
    return found


@dataclass(frozen=True)
class Sample:
    """A tally, when it was made, and under which loss scale."""

    step: int
    tally: Tally
    scale: float = 1.0
    """What the numbers were multiplied by: of gradients the loss scale."""


def lowest(format_: FloatFormat) -> int:
    """Return the power of two below which a format makes zeros of numbers."""
    return math.frexp(format_.min_subnormal)[1] - 2


def normal(format_: FloatFormat) -> int:
    """Return the power of two below which a format loses digits of numbers."""
    return math.frexp(format_.min_normal)[1] - 1


def top(format_: FloatFormat) -> int:
    """Return the power of two of a format's largest numbers."""
    return math.frexp(format_.max)[1] - 1


def merged(samples: Iterable[Sample], scale: float | None = None) -> Counter[int]:
    """Return one histogram of all samples, as they were or at one loss scale.

    Args:
        samples: Of one tensor or of many.
        scale: To hold them at, their own divided out; None: each as it was. Powers of
            two are moved exactly.
    """
    total: Counter[int] = Counter()
    for sample in samples:
        moved = round(math.log2(scale / sample.scale)) if scale else 0
        for power, count in sample.tally.exponents.items():
            total[power + moved] += count
    return total


def share_below(histogram: Mapping[int, int], power: int, above: int = -9999) -> float:
    """Return the share of the numbers from 2**above on that are below 2**power."""
    whole = sum(histogram.values())
    found = sum(count for e, count in histogram.items() if above <= e < power)
    return found / whole if whole else 0.0


def flushed(samples: Iterable[Sample], format_: FloatFormat) -> float:
    """Return the share of numbers that the format they are in has made zeros of.

    They are gone, so this is an estimate: small numbers lie about as densely above the
    border as below it, and the format's smallest number stands for twice as wide a
    stretch as that from which zero comes. It is a low one where they are denser below.

    Args:
        samples: In that format.
        format_: It.
    """
    lost = whole = 0.0
    for sample in samples:
        tally = sample.tally
        last = tally.exponents.get(lowest(format_) + 1, 0)
        gone = min(float(tally.zeros), last / 2)
        lost += gone
        whole += gone + sum(tally.exponents.values())
    return lost / whole if whole else 0.0


def span(histogram: Mapping[int, int], mass: float = 0.999) -> int:
    """Return how many powers of two the bulk of the numbers takes up.

    Args:
        histogram: Of their exponents.
        mass: Share of the numbers that counts as the bulk; the rest is cut off in
            equal parts at both ends.
    """
    whole = sum(histogram.values())
    if not whole:
        return 0
    ends, cut = [], (1 - mass) / 2 * whole
    for order in (sorted(histogram), sorted(histogram, reverse=True)):
        seen = 0
        for power in order:
            seen += histogram[power]
            if seen > cut:
                ends.append(power)
                break
    return ends[1] - ends[0] + 1

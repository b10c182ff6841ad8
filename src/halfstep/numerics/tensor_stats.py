"""What the numbers of a tensor are like, and what a cast would lose of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from halfstep.errors import UserError, require
from halfstep.numerics import formats
from halfstep.numerics.exponents import BINS, flushed_share
from halfstep.numerics.tensor_counts import CASTS, FACTS, LOSSES, Counts, add_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from halfstep.numerics.formats import FloatFormat

_BIAS = 1023


@dataclass(frozen=True)
class CastLoss:
    """What a cast makes of the finite numbers of a tensor."""

    flushed: int
    """Numbers other than zero that become zero."""
    subnormal: int
    """Numbers that become subnormal, and lose bits."""
    saturated: int
    """Finite numbers that become inf."""
    of: int
    """Finite numbers other than zero, before."""
    signal: float
    """Sum of the squares of the finite numbers."""
    noise: float
    """Sum of the squares of the errors; a number that becomes inf counts as if it came
    out as the largest one, so that the sum is finite."""

    @property
    def sqnr(self) -> float:
        """Signal over noise in dB; inf where nothing is lost, 0 where everything is.

        14.5 + 6.02 * mantissa bits at best, for numbers spread evenly over each power
        of two: fp16 74.7, bf16 56.6.
        """
        if self.of and self.flushed == self.of:
            return 0.0
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise)


@dataclass(frozen=True, eq=False)
class TensorStats:
    """What the numbers of one or more tensors of a dtype are like.

    `measure` makes it, without waiting for the device. Each property waits, the first
    time that one is read.

    Example:
        >>> stats = measure(torch.tensor([0.0, 1.5, -3.0, 1e-7]))
        >>> stats.amax, stats.zeros, stats.exponents
        (3.0, 1, {-24: 1, 0: 1, 1: 1})
        >>> stats.cast(formats.FP16).subnormal
        1
    """

    dtype: str
    """torch's word for the dtype, such as "bfloat16"."""
    casts: tuple[FloatFormat, ...]
    """Formats that `cast` knows about."""
    counted: Counts
    """On the device."""

    @cached_property
    def _read(self) -> tuple[list[int], list[float], list[float]]:
        """Counts behind the histogram, sums, extremes."""
        counted = self.counted
        return (
            counted.counts[BINS:].tolist(),
            counted.sums.tolist(),
            counted.extremes.tolist(),
        )

    def _fact(self, name: str) -> int:
        return self._read[0][FACTS.index(name)]

    @property
    def count(self) -> int:
        """All numbers; a complex one counts as two."""
        return self._fact("count")

    @property
    def zeros(self) -> int:
        """Zeros of both signs."""
        return self._fact("zeros")

    @property
    def subnormals(self) -> int:
        """Numbers below the smallest normal one of the tensor's own dtype, not zero."""
        return self._fact("subnormals")

    @property
    def infs(self) -> int:
        """Infinities of both signs."""
        return self._fact("infs")

    @property
    def nans(self) -> int:
        """NaNs, whatever their bits."""
        return self._fact("nans")

    @property
    def finite(self) -> bool:
        """There is neither inf nor NaN."""
        return not (self.infs or self.nans)

    @property
    def amax(self) -> float:
        """Largest finite magnitude, 0.0 if there is none."""
        return self._read[2][0]

    @property
    def amin(self) -> float:
        """Smallest finite magnitude other than zero, 0.0 if there is none."""
        lowest = -self._read[2][1]
        return lowest if math.isfinite(lowest) else 0.0

    @property
    def exponents(self) -> dict[int, int]:
        """floor(log2(abs(x))) -> how many finite numbers other than zero have it.

        fp64's own subnormal numbers, below 2**-1022, are in none.
        """
        bins = self.counted.counts[1 : BINS - 1].cpu()
        filled = bins.nonzero().flatten()
        pairs = zip(filled.tolist(), bins[filled].tolist(), strict=True)
        return {at + 1 - _BIAS: many for at, many in pairs}

    @property
    def nonzero(self) -> int:
        """Finite numbers other than zero."""
        return self.count - self.zeros - self.infs - self.nans

    def cast(self, to: FloatFormat | str | torch.dtype) -> CastLoss:
        """Return what a cast of all these numbers loses, found by casting them.

        Raises:
            UserError: If that cast was not measured.
        """
        format_ = _format(to)
        if format_ not in self.casts:
            measured = ", ".join(map(str, self.casts)) or "none"
            message = (
                f"a cast to {format_} was not measured, only {measured}: "
                f"measure(tensor, casts=({format_.name.upper()},))."
            )
            raise UserError(message)
        index = self.casts.index(format_)
        counts, sums, _ = self._read
        start = len(FACTS) + len(LOSSES) * index
        return CastLoss(
            *(counts[start], counts[start + 1], counts[start + 2]),
            of=self.nonzero,
            signal=sums[0],
            noise=sums[1 + index],
        )

    def underflow(
        self, to: FloatFormat | str | torch.dtype, scale: float = 1.0
    ) -> float:
        """Return which share of the numbers other than zero a format flushes to zero.

        From the histogram, so at any scale without looking at the tensor again. A
        number of exactly half the format's smallest one is flushed as well, and not
        counted.

        Args:
            to: The format that holds them, multiplied by `scale`.
            scale: Loss scale. A power of two above 0.
        """
        _require_power("scale", scale)
        histogram = self.counted.counts[:BINS].cpu()
        wide = torch.tensor(scale, dtype=torch.float64)
        return flushed_share(histogram, wide, _format(to).dtype).item()

    def headroom(
        self, to: FloatFormat | str | torch.dtype, scale: float = 1.0
    ) -> float:
        """Return how many more powers of two fit before the largest number overflows.

        log2(largest of the format / (amax * scale)): below 0 it has overflowed; inf
        where all is zero.

        Args:
            to: The format that holds the numbers, multiplied by `scale`.
            scale: Loss scale, above 0.
        """
        require("scale", scale, 0 < scale < math.inf, "above 0 and finite")
        if not self.amax:
            return math.inf
        return math.log2(_format(to).max) - math.log2(self.amax) - math.log2(scale)

    def merge(self, other: TensorStats) -> TensorStats:
        """Return the statistics of the numbers of both. Waits for nothing.

        Raises:
            UserError: If they are of different dtypes or casts.
        """
        _require_same_kind(self, other)
        return TensorStats(self.dtype, self.casts, self.counted.add(other.counted))

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`. Waits for the device."""
        facts = {name: self._fact(name) for name in FACTS}
        losses = {form.name: self.cast(form) for form in self.casts}
        return {
            "dtype": self.dtype,
            **facts,
            "amax": self.amax,
            "amin": self.amin,
            "exponents": {str(at): many for at, many in self.exponents.items()},
            "casts": {
                name: {word: getattr(loss, word) for word in (*LOSSES, *_SUMS)}
                for name, loss in losses.items()
            },
        }


_SUMS = ("signal", "noise")


def measure(
    tensor: Tensor, casts: Iterable[FloatFormat | str | torch.dtype] = CASTS
) -> TensorStats:
    """Measure a tensor on its device, without waiting.

    In pieces, of 2**16 numbers on a CPU (2**20 of 16 bits): what it takes beside the
    tensor does
    not grow with it, but for a copy of one with gaps between its numbers.

    Args:
        tensor: fp16, bf16, fp32 or fp64, of any shape, empty too; a complex one counts
            with both parts. Of a DTensor this rank's part, of a sparse tensor the
            numbers it stores.
        casts: Formats to cast to, to see what is lost: those that training casts to.

    Raises:
        UserError: If the tensor is of another dtype, or a format is unknown.
    """
    forms = tuple(map(_format, casts))
    counted = Counts.zeros(len(forms), tensor.device)
    add_(counted, tensor, forms)
    real = tensor.real if tensor.is_complex() else tensor
    return TensorStats(str(real.dtype).removeprefix("torch."), forms, counted)


def all_reduce_counts(
    counted: Counts, group: dist.ProcessGroup | None = None
) -> Counts:
    """Return the counts of all processes, of one tensor or of rows of them.

    All must call it, with as many rows. Three collectives, whatever the rows.
    """
    totals = Counts(*(t.clone() for t in vars(counted).values()))
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals.counts, group=group)
        dist.all_reduce(totals.sums, group=group)
        dist.all_reduce(totals.extremes, dist.ReduceOp.MAX, group=group)
    return totals


def _format(word: FloatFormat | str | torch.dtype) -> FloatFormat:
    return word if isinstance(word, formats.FloatFormat) else formats.parse(word)


def _require_power(name: str, value: float) -> None:
    good = 0 < value < math.inf and math.frexp(value)[0] == 0.5  # noqa: PLR2004
    require(name, value, good, "a power of two above 0")


def _require_same_kind(one: TensorStats, other: TensorStats) -> None:
    if one.dtype != other.dtype or one.casts != other.casts:
        names = [", ".join(map(str, each.casts)) or "none" for each in (one, other)]
        message = (
            f"statistics of {one.dtype} (casts: {names[0]}) do not merge with those of "
            f"{other.dtype} (casts: {names[1]}): measure both alike."
        )
        raise UserError(message)

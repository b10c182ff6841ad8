"""Statistics of a tensor's values, and of the losses of casts to other formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

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
    """What a cast to another format loses of the finite numbers of a tensor."""

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
    """Statistics of the numbers of one or more tensors of one dtype.

    `measure` makes it without synchronization. The first property that is read
    synchronizes with the device.

    Example:
        >>> stats = measure(torch.tensor([0.0, 1.5, -3.0, 1e-7]))
        >>> stats.amax, stats.zeros, stats.exponents
        (3.0, 1, {-24: 1, 0: 1, 1: 1})
        >>> stats.cast(formats.FP16).subnormal
        1
    """

    dtype: str
    """torch's name of the dtype, such as "bfloat16"."""
    casts: tuple[FloatFormat, ...]
    """Formats whose casts were measured, for `cast`."""
    counted: Counts
    """The counts, on the device."""

    @cached_property
    def _read(self) -> tuple[list[int], list[float], list[float]]:
        """Counts after the histogram, sums, extremes, read from the device."""
        counted = self.counted
        after = counted.counts[BINS:]
        return after.tolist(), counted.sums.tolist(), counted.extremes.tolist()

    def _fact(self, name: str) -> int:
        return self._read[0][FACTS.index(name)]

    @property
    def count(self) -> int:
        """Number of all numbers; a complex one counts as two."""
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
        """Whether there is neither inf nor NaN."""
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
        """floor(log2(abs(x))) -> number of finite non-zero numbers with this exponent.

        fp64's subnormal numbers, below 2**-1022, are not counted.
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
        """Return what a cast of all these numbers loses, measured by casting them.

        Args:
            to: One of `casts`.

        Raises:
            UserError: If that cast was not measured.
        """
        format_ = formats.parse(to)
        if format_ not in self.casts:
            measured = ", ".join(map(str, self.casts)) or "none"
            raise UserError(
                f"a cast to {format_} was not measured, only {measured}: "
                f"measure(tensor, casts=({format_.name.upper()},))."
            )
        index = self.casts.index(format_)
        counts, sums, _ = self._read
        start = len(FACTS) + len(LOSSES) * index
        flushed, subnormal, saturated = counts[start : start + len(LOSSES)]
        squares = sums[0], sums[1 + index]
        return CastLoss(flushed, subnormal, saturated, self.nonzero, *squares)

    def underflow(
        self, to: FloatFormat | str | torch.dtype, scale: float = 1.0
    ) -> float:
        """Return the share of non-zero numbers that a format flushes to zero, 0 to 1.

        It is computed from the histogram, so that any scale can be asked for. A number
        of exactly half the format's smallest one is flushed too, but not counted.

        Args:
            to: The format that holds them, multiplied by `scale`.
            scale: Loss scale. A power of two above 0.
        """
        is_power = 0 < scale < math.inf and math.frexp(scale)[0] == 0.5  # noqa: PLR2004
        require("scale", scale, is_power, "a power of two above 0")
        histogram = self.counted.counts[:BINS].cpu()
        wide = torch.tensor(scale, dtype=torch.float64)
        return flushed_share(histogram, wide, formats.parse(to).dtype).item()

    def headroom(
        self, to: FloatFormat | str | torch.dtype, scale: float = 1.0
    ) -> float:
        """Return the headroom in powers of two before the largest number overflows.

        It is log2(largest number of the format / (amax * scale)): negative after an
        overflow, inf if all numbers are zero.

        Args:
            to: The format that holds the numbers, multiplied by `scale`.
            scale: Loss scale, above 0.
        """
        require("scale", scale, 0 < scale < math.inf, "above 0 and finite")
        if not self.amax:
            return math.inf
        largest = formats.parse(to).max
        return math.log2(largest) - math.log2(self.amax) - math.log2(scale)

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`. Synchronizes with the device."""
        losses = {form.name: self.cast(form) for form in self.casts}
        return {
            "dtype": self.dtype,
            **{name: self._fact(name) for name in FACTS},
            "amax": self.amax,
            "amin": self.amin,
            "exponents": {str(at): many for at, many in self.exponents.items()},
            "casts": {
                name: {w: getattr(loss, w) for w in (*LOSSES, "signal", "noise")}
                for name, loss in losses.items()
            },
        }


def measure(
    tensor: Tensor, casts: Iterable[FloatFormat | str | torch.dtype] = CASTS
) -> TensorStats:
    """Measure a tensor on its device, without synchronization.

    It works in chunks, so that its memory does not grow with the tensor, except for a
    copy of one that is not contiguous.

    Args:
        tensor: fp16, bf16, fp32, fp64 or complex, any shape, also empty. Of a DTensor
            this rank's part is measured, of a sparse tensor its stored numbers.
        casts: Formats whose rounding, underflow and overflow are measured. Default:
            fp16 and bf16, those that training casts to.

    Raises:
        UserError: If the tensor is of another dtype, or a format is unknown.

    Example:
        >>> measure(torch.tensor([1e-9, 1.0])).cast("fp16").flushed
        1
    """
    forms = tuple(map(formats.parse, casts))
    counted = Counts.zeros(len(forms), tensor.device)
    add_(counted, tensor, forms)
    real = tensor.real if tensor.is_complex() else tensor
    return TensorStats(str(real.dtype).removeprefix("torch."), forms, counted)

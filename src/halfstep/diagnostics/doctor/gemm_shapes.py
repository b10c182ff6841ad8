"""Matrix products in a profile: their sizes, and what hardware makes of those."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.diagnostics.profiling import Profile, Row

AMX = (16, 32, 16)
"""Rows, summed, columns of one AMX tile product of bf16 (Intel, chapter on AMX)."""
TENSOR_CORES = 8
"""Numbers of 16 bits in the 16 bytes to which tensor cores want each size aligned."""
LOW = {"bf16", "fp16", "bfloat16", "float16", "c10::BFloat16", "c10::Half"}
"""What 16-bit formats are called."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A product of (rows x summed) and (summed x columns), so many at once."""

    batch: int
    rows: int
    summed: int
    columns: int

    @property
    def flops(self) -> float:
        """Operations of all of them, a multiplication and an addition each."""
        return 2.0 * self.batch * self.rows * self.summed * self.columns

    @property
    def useful(self) -> float:
        """Share of what AMX computes that is no padding, 0 to 1."""
        sizes = (self.rows, self.summed, self.columns)
        padded = [
            math.ceil(n / tile) * tile for n, tile in zip(sizes, AMX, strict=True)
        ]
        return math.prod(sizes) / (math.prod(padded) or 1)

    @property
    def aligned(self) -> bool:
        """Whether tensor cores find each size a multiple of 8."""
        return not any(n % TENSOR_CORES for n in (self.rows, self.summed, self.columns))

    def __str__(self) -> str:
        """Return the sizes as people write them."""
        many = f"{self.batch} x " if self.batch > 1 else ""
        return f"{many}({self.rows} x {self.summed}) ({self.summed} x {self.columns})"


def _plain(left: Shape, right: Shape) -> Size | None:
    if len(left) != 2 or len(right) != 2 or left[1] != right[0]:  # noqa: PLR2004
        return None
    return Size(1, left[0], left[1], right[1])


def _many(left: Shape, right: Shape) -> Size | None:
    if len(left) < 3 or len(right) < 3 or left[-1] != right[-2]:  # noqa: PLR2004
        return None
    return Size(math.prod(left[:-2]), left[-2], left[-1], right[-1])


def _linear(left: Shape, right: Shape) -> Size | None:
    if not left or len(right) != 2 or left[-1] != right[1]:  # noqa: PLR2004
        return None
    return Size(1, math.prod(left[:-1]), left[-1], right[0])


_FORMS: dict[str, tuple[int, Callable[[Shape, Shape], Size | None]]] = {
    "mm": (0, _plain),
    "addmm": (1, _plain),
    "addmm_": (1, _plain),
    "bmm": (0, _many),
    "baddbmm": (1, _many),
    "linear": (0, _linear),
    "mkldnn_linear": (0, _linear),
    "_linear_pointwise": (0, _linear),
}
"""Operation -> which of its inputs is the left factor, and how the sizes are read."""


def name_of(op: str) -> str:
    """Return an operation's bare name: "mm" of "aten::mm" and "aten.mm.default"."""
    name = op.rpartition("::")[2]
    if name.startswith("aten."):
        name = name.removeprefix("aten.").partition(".")[0]
    return name


def size_of(row: Row) -> Size | None:
    """Return the sizes of a row's product; None if it is none, or they are odd."""
    form = _FORMS.get(name_of(row.op))
    if form is None:
        return None
    first, read = form
    if len(row.shapes) < first + 2:
        return None
    size = read(row.shapes[first], row.shapes[first + 1])
    return size if size is not None and size.flops else None


def low_products(profile: Profile) -> Iterator[tuple[Row, Size]]:
    """Yield the products of 16-bit numbers; those of an unknown format count too."""
    for row in profile.rows:
        size = size_of(row)
        if size is not None and (not row.dtypes or LOW & set(row.dtypes)):
            yield row, size

"""Holds the profile of a training step as plain values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from halfstep.reporting.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from halfstep.reporting.table import Cell

GEMM = re.compile(
    r"(add)?(mm|bmm|mv)|baddbmm|addbmm|_addmm_activation|_scaled_mm"
    r"|.*conv(olution)?([1-3]d)?(_.*)?(backward)?|.*_dilated[23]d.*"
    r"|.*(flash|efficient|cudnn|fused|overrideable)_attention.*"
    r"|_scaled_dot_product.*|mkldnn_rnn_layer.*|_cudnn_rnn.*|mkldnn_linear.*"
    r"|.*linear_pointwise.*|_flex_attention.*"
)
"""Names of operations that run a GEMM, convolution or attention kernel; "linear" and
"matmul" only call such an operation."""


LOW = {"bf16", "fp16"}
FLOATS = LOW | {"fp32", "float64"}
_OF_UPDATES = ("_foreach", "_fused", "_amp")
"""Prefixes of operations on lists of gradients and weights."""


def is_fp32_only(name: str, dtypes: Iterable[str]) -> bool:
    """Return whether an operation, not of the update, has only operands >= fp32."""
    floats = (FLOATS | {"complex64", "complex128"}).intersection(dtypes)
    of_passes = not name.startswith(_OF_UPDATES) and not GEMM.fullmatch(name)
    return of_passes and bool(floats) and not floats & LOW


@dataclass(frozen=True)
class Row:
    """All calls of one operation on operands of the same shapes and dtypes."""

    op: str
    """Dispatcher name without "aten::", such as "addmm"; for halfstep's kernels and
    compiled graphs, the name in the profiler."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensor operands, in order; lists of tensors are left out."""
    dtypes: tuple[str, ...]
    """Dtypes of the same: "fp32", "bf16", "fp16", or torch's name."""
    calls: int
    """Calls in one step."""
    self_s: float
    """Self time in one step, in seconds; on a GPU, the time of its kernels."""

    @property
    def name(self) -> str:
        """The name without its library: "mm" of "aten::mm"."""
        return self.op.rpartition("::")[2]

    def operands(self) -> str:
        """Return dtypes and shapes as text, such as "bf16 (8 x 16), fp32 (16)"."""
        pairs = zip(self.dtypes, self.shapes, strict=False)  # a file may lack some
        words = (f"{dtype} ({' x '.join(map(str, shape))})" for dtype, shape in pairs)
        return ", ".join(words)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Row:
        """Return the row from the plain values of `Profile.data`."""
        shapes = tuple(tuple(map(int, shape)) for shape in data["shapes"])
        calls, seconds = int(data["calls"]), float(data["self_s"])
        return cls(str(data["op"]), shapes, tuple(data["dtypes"]), calls, seconds)


@dataclass(frozen=True)
class Profile:
    """The times of one step, in seconds.

    Times in `rows` are measured under the profiler, which slows a step down, and scaled
    to the length of a step without it. Shares are accurate to a few hundredths, and
    small operations appear slightly too large.
    """

    wall_s: float
    """Mean length of a step without the profiler, input included."""
    rows: tuple[Row, ...] = ()
    """Operations, longest first."""
    casts_s: float = 0.0
    """Copies from one float dtype to another, by autocast or by the program."""
    gemm_s: float = 0.0
    """Matmuls, convolutions, attention and recurrent layers."""
    fp32_only_s: float = 0.0
    """In a 16-bit run: operations whose floating operands are all fp32 or wider,
    without GEMMs, casts and the optimizer's update. 0 in an fp32 run."""
    update_s: float = 0.0
    """The optimizer's step."""
    python_s: float = 0.0
    """CPU: time outside of operations, in Python and autograd. GPU: time in which the
    device was idle. Without the time spent on input."""
    waits: int = 0
    """Host-device synchronizations in a step. On a CPU: reads of a scalar from a
    tensor, which would synchronize on a GPU."""
    wait_s: float = 0.0
    """Time in these."""
    input_s: float = 0.0
    """Fetching batches; on a GPU, only while the device was idle."""
    device: str | None = None
    """"cpu", or "cuda" if kernels of a GPU were recorded; None: unknown."""
    level: str | None = None
    """The run's level; None if it was not given."""
    dtype: str | None = None
    """The run's format, or else that of most of the matmul time."""
    optimizer: str | None = None
    """Class of the only optimizer whose own `step` was called; None: none, several."""

    def share(self, seconds: float) -> float:
        """Return the share of the step time that some seconds are, 0 to 1."""
        return min(1.0, seconds / self.wall_s) if self.wall_s else 0.0

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)

    def table(self, most: int = 8) -> Table:
        """Return the profile as a table, with the `most` longest operations."""
        parts = {
            "data loading": self.input_s,
            "outside operations": self.python_s,
            "matrix products": self.gemm_s,
            "casts": self.casts_s,
            "fp32 in a 16-bit run": self.fp32_only_s,
            "optimizer": self.update_s,
            "waits": self.wait_s,
        }
        rows: list[tuple[Cell, ...]] = [
            (name, "-", None, 1000 * spent, 100 * self.share(spent))
            for name, spent in parts.items()
        ]
        for row in self.rows[:most]:
            share = 100 * self.share(row.self_s)
            rows.append((row.op, row.operands(), row.calls, 1000 * row.self_s, share))
        step_time = f"{1000 * self.wall_s:.3f} ms a step on {self.device}"
        waits = f"{self.waits} waits for the device"
        if self.device == "cpu":
            waits = f"{self.waits} numbers read out of tensors"
        note = f"{step_time}; {waits}. The first lines may overlap."
        columns = ("what", "operands", "calls", "ms", "% of a step")
        return Table("Where the time goes", columns, tuple(rows), (note,))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Profile:
        """Return the profile from the plain values of `data()`."""
        spent = {name: float(data[name]) for name in data if name.endswith("_s")}
        return cls(**{**data, **spent, "rows": tuple(map(Row.from_data, data["rows"]))})

"""Where the time of a training step went, as plain values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any

from halfstep.reporting import json_fields
from halfstep.reporting.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from halfstep.reporting.table import Cell

GEMM = re.compile(
    r"(add)?(mm|bmm|mv)|baddbmm|addbmm|_addmm_activation|_scaled_mm"
    r"|.*conv(olution)?([1-3]d)?(_.*)?(backward)?|.*_dilated[23]d.*"
    r"|.*(flash|efficient|cudnn|fused|overrideable)_attention.*"
    r"|_scaled_dot_product.*|mkldnn_rnn_layer.*|_cudnn_rnn.*|mkldnn_linear.*"
    r"|.*linear_pointwise.*|_flex_attention.*"
)
"""Names of the operations that are matrix products, as kernels have them: "linear" and
"matmul" only call one."""


LOW = {"bf16", "fp16"}
FLOATS = LOW | {"fp32", "float64"}
_OF_UPDATES = ("_foreach", "_fused", "_amp")
"""How operations begin that work on lists of gradients and weights."""


def is_fp32_only(name: str, dtypes: Iterable[str]) -> bool:
    """Say whether an operation of the passes computes in fp32 or wider, and only so."""
    floats = (FLOATS | {"complex64", "complex128"}).intersection(dtypes)
    of_passes = not name.startswith(_OF_UPDATES) and not GEMM.fullmatch(name)
    return of_passes and bool(floats) and not floats & LOW


@dataclass(frozen=True)
class Row:
    """All calls of one operation on operands of the same shapes and dtypes."""

    op: str
    """As the dispatcher has it, without "aten::", such as "addmm"; kernels of ours and
    compiled graphs by the name under which the profiler shows them."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its tensor operands, in order; of lists of tensors nothing is known."""
    dtypes: tuple[str, ...]
    """Of the same: "fp32", "bf16", "fp16", or torch's word."""
    calls: int
    """In one step."""
    self_s: float
    """Seconds of one step, what it calls left out; on a GPU those of its kernels."""

    @property
    def name(self) -> str:
        """Without its library: "mm" of "aten::mm"."""
        return self.op.rpartition("::")[2]

    def operands(self) -> str:
        """Return dtypes and shapes in words, such as "bf16 (8 x 16), fp32 (16)"."""
        pairs = zip(self.dtypes, self.shapes, strict=False)  # a file may lack some
        words = (f"{dtype} ({' x '.join(map(str, shape))})" for dtype, shape in pairs)
        return ", ".join(words)

    @classmethod
    def from_data(cls, data: object) -> Row:
        """Return the row that `data` was made from.

        Raises:
            UserError: If it is nothing of the kind.
        """
        fields = json_fields.mapping(data, "rows")
        shapes = (
            json_fields.items(shape, "shapes")
            for shape in json_fields.items(fields.get("shapes") or [], "shapes")
        )
        return cls(
            json_fields.optional_text(fields, "op") or "unknown",
            tuple(
                tuple(json_fields.integer({"shapes": n}, "shapes") for n in shape)
                for shape in shapes
            ),
            json_fields.texts(fields, "dtypes"),
            int(json_fields.non_negative(fields, "calls")),
            json_fields.non_negative(fields, "self_s"),
        )


@dataclass(frozen=True)
class Profile:
    """One step, in seconds.

    What is in `rows` was seen under the profiler, which slows a step down; it was
    brought to the length of a step without it. So shares are to be trusted to some
    hundredths, and small operations look a little larger than they are.
    """

    wall_s: float
    """Mean length of a step without the profiler, input included."""
    rows: tuple[Row, ...] = ()
    """Longest first."""
    casts_s: float = 0.0
    """In copies from one float dtype to another, wherever they were asked for."""
    gemm_s: float = 0.0
    """In matrix products, convolutions, attention and recurrent layers."""
    fp32_only_s: float = 0.0
    """In a run in 16 bits: in operations all of whose floating operands were fp32 or
    wider. Products, casts and the optimizer's update are not among them. 0 in a run
    in fp32."""
    update_s: float = 0.0
    """In the optimizer's step."""
    python_s: float = 0.0
    """On a CPU: outside of any operation, in Python and autograd. On a GPU: while the
    device had nothing to do. Time spent on input is not part of it."""
    waits: int = 0
    """How often a step waited for the device. On a CPU, which has nothing to wait for:
    how often it read a number out of a tensor, which on a GPU would wait."""
    wait_s: float = 0.0
    """In these."""
    input_s: float = 0.0
    """In fetching batches; on a GPU, while the device had nothing to do."""
    device: str | None = None
    """"cpu", or "cuda" where a device was seen at work; None: not known."""
    level: str | None = None
    """The level that the run asked for; None where it was not given."""
    dtype: str | None = None
    """The format that the run asked for, or else the one its products ran in."""

    def share(self, seconds: float) -> float:
        """Return what part of a step some seconds are, 0 to 1."""
        return min(1.0, seconds / self.wall_s) if self.wall_s else 0.0

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)

    def parts(self) -> dict[str, float]:
        """Return the seconds of the parts of a step; other operations are the rest."""
        return {
            "data loading": self.input_s,
            "outside operations": self.python_s,
            "matrix products": self.gemm_s,
            "casts": self.casts_s,
            "fp32 in a 16-bit run": self.fp32_only_s,
            "optimizer": self.update_s,
        }

    def table(self, most: int = 8) -> Table:
        """Return where the time goes, for people.

        Args:
            most: Operations that are named, longest first.
        """
        names = self.parts() | {"waits": self.wait_s}
        rows: list[tuple[Cell, ...]] = [
            (name, "-", None, 1000 * spent, 100 * self.share(spent))
            for name, spent in names.items()
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
    def from_data(cls, data: object) -> Profile:
        """Return the profile that `data` was made from, through JSON or not.

        Raises:
            UserError: If it is nothing of the kind.
        """
        fields = json_fields.mapping(data, "profile")
        rows = json_fields.items(fields.get("rows") or [], "rows")
        values: dict[str, Any] = {
            each.name: json_fields.non_negative(fields, each.name)
            for each in dataclass_fields(cls)
            if each.name.endswith("_s")
        }
        for name in ("device", "level", "dtype"):
            values[name] = json_fields.optional_text(fields, name)
        values["waits"] = int(json_fields.non_negative(fields, "waits"))
        return cls(rows=tuple(map(Row.from_data, rows)), **values)

"""`Plan`: the format of each operation of a graph, with its reason, time and casts.

A plan prints as a table and saves as a TOML file that can be edited.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import UserError
from halfstep.reporting.table import Report, Table, write_text

if TYPE_CHECKING:
    from os import PathLike

    from torch import fx

    from halfstep.graph.problem import Problem


@dataclass(frozen=True)
class PlannedNode:
    """One operation of a plan: its format, and why."""

    name: str
    """Name of the node in the graph."""
    op: str
    """Name of the operation in `torch.ops.aten`."""
    module: str
    """Path of the module that runs it; "" is the model itself."""
    source: str
    """File and line of the user's code, or ""."""
    low: bool
    """Whether it runs in 16 bits."""
    kind: str
    """"allow", "infer", "clear" or "deny"."""
    reason: str
    """Why it is of this kind."""
    low_ms: float
    """Predicted milliseconds in 16 bits, forward and backward; 0.0 if denied."""
    fp32_ms: float
    """Predicted milliseconds in fp32, forward and backward."""

    @property
    def ms(self) -> float:
        """Predicted milliseconds in the chosen format."""
        return self.low_ms if self.low else self.fp32_ms


@dataclass(frozen=True)
class PlannedCast:
    """One cast of a plan, shared by all its consumers."""

    tensor: str
    """Name of the node that computes the tensor."""
    to: str
    """Name of the format to cast to."""
    bytes: int
    """Bytes read plus bytes written."""
    ms: float


@dataclass(frozen=True)
class Slowdown:
    """Time of operations in a pass of the whole model, relative to each run alone.

    Alone, an operation finds its operands in the CPU's cache; in a model they come from
    memory, with Python and autograd overhead in between. On a GPU it is the opposite:
    alone, each operation waits for its launch.
    """

    fp32: float = 1.0
    low: float = 1.0
    """Factor on operations in 16 bits, and on casts."""

    def text(self, dtype: str) -> str:
        """Return both factors as a sentence; `dtype` names the 16-bit format."""
        return (
            f"in the model, operations take {self.fp32:.2f} (fp32) and {self.low:.2f} "
            f"({dtype}) of what they take alone"
        )

    def of(self, problem: Problem) -> Problem:
        """Return a problem with the costs multiplied by the factors."""
        operations = {
            name: replace(
                each,
                low_cost=round(each.low_cost * self.low),
                fp32_cost=round(each.fp32_cost * self.fp32),
            )
            for name, each in problem.operations.items()
        }
        tensors = tuple(
            replace(use, cast_cost=round(use.cast_cost * self.low))
            for use in problem.tensors
        )
        return replace(problem, operations=operations, tensors=tensors)


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """The precision of each operation of one captured graph; `plan` makes it."""

    dtype: str
    """Name of the 16-bit format."""
    method: str
    nodes: tuple[PlannedNode, ...]
    casts: tuple[PlannedCast, ...]
    graph_module: fx.GraphModule = field(repr=False, compare=False)
    """The captured graph; it shares the parameters of the model."""
    low_weights: tuple[str, ...] = ()
    """Names of the parameters that are stored in 16 bits when the plan runs."""
    doubt: str = ""
    """Why the times may be wrong: the machine had too little memory; "" if it had."""
    slowdown: Slowdown = Slowdown()
    """Correction of the predicted times for a pass of the whole model."""

    @property
    def ms(self) -> float:
        """Predicted milliseconds, forward and backward, casts included."""
        return sum(node.ms for node in self.nodes) + sum(cast.ms for cast in self.casts)

    @property
    def fp32_ms(self) -> float:
        """Predicted milliseconds with every operation in fp32."""
        return sum(node.fp32_ms for node in self.nodes)

    @property
    def low(self) -> frozenset[str]:
        """Names of the nodes in 16 bits."""
        return frozenset(node.name for node in self.nodes if node.low)

    def table(self) -> Table:
        """Return a table with one row per operation."""
        rows = tuple(
            (
                node.name,
                node.op,
                node.module,
                node.source,
                self.dtype if node.low else "fp32",
                f"{node.kind}: {node.reason}",
                f"{node.ms:.3f}",
            )
            for node in self.nodes
        )
        casts = f"{len(self.casts)} casts ({self.method})"
        times = f"{self.ms:.3f} ms forward and backward, {self.fp32_ms:.3f} in fp32"
        num_low = sum(node.low for node in self.nodes)
        return Table(
            "plan",
            ("node", "op", "module", "source", "runs in", "why", "ms"),
            rows,
            notes=(
                f"{num_low} of {len(rows)} operations in {self.dtype}, {casts}",
                f"predicted: {times}",
                self.slowdown.text(self.dtype),
                *([self.doubt] if self.doubt else []),
            ),
        )

    def __str__(self) -> str:
        """Return the table as text."""
        return self.table().text()

    def __repr__(self) -> str:
        """Return the number of operations and casts, and the predicted time."""
        return f"<Plan: {'; '.join(self.table().notes[:2])}>"

    def _repr_html_(self) -> str:
        """Return the first operations as notebooks show them."""
        return self.table().head()._repr_html_()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as TOML, which `load_plan` reads.

        Args:
            path: File to write or replace, atomically. Each line holds an operation;
                `runs_in` may be edited.

        Raises:
            UserError: If it cannot be written.

        Example:
            >>> import tempfile
            >>> import halfstep as hs, torch
            >>> from halfstep.graph import load_plan
            >>> path = Path(tempfile.mkdtemp()) / "plan.toml"
            >>> model, inputs = torch.nn.Linear(8, 2), [torch.randn(4, 8)]
            >>> hs.plan(model, inputs, method="painting").save(path)
            >>> load_plan(path, model, inputs).low
            frozenset({'linear'})
        """
        lines = [
            "# halfstep plan: runs_in may be edited; casts follow from it.",
            f"dtype = {json.dumps(self.dtype)}",
            f"method = {json.dumps(self.method)}",
            f"low_weights = {json.dumps(self.low_weights)}",
            f"slowdown = {self._inline(self.slowdown)}",
        ]
        for name, rows in (("nodes", self.nodes), ("casts", self.casts)):
            lines += [f"{name} = [", *(f"  {self._inline(row)}," for row in rows), "]"]
        try:
            write_text(Path(path), "\n".join(lines) + "\n")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error

    def _inline(self, row: PlannedNode | PlannedCast | Slowdown) -> str:
        """Return a dataclass as an inline TOML table; TOML strings are JSON strings."""
        fields = asdict(row)
        if isinstance(row, PlannedNode):
            fields["low"] = self.dtype if fields["low"] else "fp32"
            fields = {"runs_in" if n == "low" else n: v for n, v in fields.items()}
        pairs = (f"{name} = {json.dumps(value)}" for name, value in fields.items())
        return f"{{{', '.join(pairs)}}}"

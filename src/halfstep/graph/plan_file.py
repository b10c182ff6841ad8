"""`load_plan`: reads a plan from a file.

In: a file that `Plan.save` wrote and that may have been edited, and the model. Out: the
`Plan`, after checking that its operations match the model's, one by one.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError, require_type
from halfstep.graph import capture
from halfstep.graph.op_times import OpTimes
from halfstep.graph.plan import Plan, Slowdown
from halfstep.graph.planner import METHODS, assemble, device_of, weigh
from halfstep.graph.problem import DENY, KINDS, Operation
from halfstep.numerics import formats
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx, nn

_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("name", "op", "module", "runs_in", "kind", "reason"), str),
    **dict.fromkeys(("low_ms", "fp32_ms"), (int, float)),
}


def load_plan(
    path: str | PathLike[str], model: nn.Module, example_inputs: Sequence[Any]
) -> Plan:
    """Return the plan in a file, for a model that has the operations it names.

    Args:
        path: As `Plan.save` wrote it; `runs_in` may have been edited. Casts and where
            they are follow from it; those in the file are not read.
        model: As for `plan`.
        example_inputs: As for `plan`; shapes may be others.

    Raises:
        UserError: If the file is no plan, the model has other operations, or one that
            cannot run in 16 bits is asked to.
    """
    require_type("path", path, isinstance(path, str | PathLike), "a path")
    try:
        content = tomllib.loads(Path(path).read_bytes().decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as a plan: {reason}.") from error
    rows, slowdown = _rows(path, content), _slowdown(path, content)
    graph_module = capture.capture(model, example_inputs)
    device = device_of(model, example_inputs)
    format_ = formats.FORMATS[content["dtype"]]
    facts = capture.facts(
        graph_module,
        device=device.type,
        policy=Policy.parse("lean"),
        low=format_.dtype,
        kinds={},
    )
    op_times = OpTimes(device, format_.dtype, capture.differentiable(graph_module))
    operations = {node.name: Operation(DENY) for node in graph_module.graph.nodes}
    low = set()
    for number, (node, fact) in enumerate(facts.items()):
        row = rows[number] if number < len(rows) else {}
        own = {"name": node.name, "op": fact.op, "module": fact.module}
        if own != {name: row.get(name) for name in own}:
            actual = _place(row) if row else "ends there"
            raise UserError(
                f"{path} is of another model: operation {number + 1} of this "
                f"{type(model).__name__} is {_place(own)}; the file's {actual}."
            )
        if row["runs_in"] != "fp32":
            low_time = op_times.operation(node, low=True)
            if fact.fixed or low_time is None:
                why = fact.reason if fact.fixed else f"it has no {format_} kernel"
                raise UserError(f"{path}: {node.name} must run in fp32: {why}.")
            low.add(node.name)
            if not row["low_ms"]:  # "deny"
                row["low_ms"] = low_time * slowdown.low / 1e6
        facts[node] = replace(fact, kind=row["kind"], reason=row["reason"])
        times = round(row["low_ms"] * 1e6), round(row["fp32_ms"] * 1e6)
        operations[node.name] = Operation(row["kind"], *times)
    if len(rows) > len(facts):
        raise UserError(
            f"{path} is of another model: this {type(model).__name__} ends before "
            f"operation {len(facts) + 1} of the file, {_place(rows[len(facts)])}."
        )
    low_weights = _low_weights(path, content, graph_module)
    problem = weigh(graph_module.graph, operations, op_times, low_weights=low_weights)
    op_times.save()
    problem = replace(slowdown.of(problem), operations=operations)
    for group in problem.tied:
        if group & low and group - low:
            names = " and ".join(sorted(group))
            message = f"{path}: {names} share memory, so they must run in one format."
            raise UserError(message)
    return assemble(
        graph_module,
        format_.name,
        content["method"],
        facts,
        problem,
        low,
        "",
        low_weights,
        slowdown,
    )


def _low_weights(
    path: str | PathLike[str], content: dict[str, Any], graph_module: fx.GraphModule
) -> list[str]:
    """Return the parameters that a file lists as stored in 16 bits."""
    value = content.get("low_weights", [])
    names: list[Any] = value if isinstance(value, list) else [value]
    own = dict(graph_module.named_parameters(remove_duplicate=False))
    for name in names:
        if not isinstance(name, str) or name not in own:
            raise UserError(f"{path}: low_weights has {name!r}, which is no parameter.")
    return names


def _slowdown(path: str | PathLike[str], content: dict[str, Any]) -> Slowdown:
    """Return the `Slowdown` in a file."""
    factors = content.get("slowdown", {})
    if (
        isinstance(factors, dict)
        and factors.keys() <= {"fp32", "low"}
        and all(isinstance(f, int | float) for f in factors.values())
        and all(0 < f < math.inf for f in factors.values())
    ):
        return Slowdown(**factors)
    message = f"{path}: slowdown is {factors!r}; it must be fp32 and low, both above 0."
    raise UserError(message)


def _rows(path: str | PathLike[str], content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the node rows of a file, validated."""
    dtype, rows = content.get("dtype"), content.get("nodes")
    if dtype not in ("bf16", "fp16"):
        raise UserError(f"{path}: dtype is {dtype!r}; it must be 'bf16' or 'fp16'.")
    if not isinstance(rows, list) or content.get("method") not in METHODS:
        message = f"{path} is no plan: it needs nodes, and {' or '.join(METHODS)}."
        raise UserError(message)
    allowed = ("dtype", "method", "low_weights", "slowdown", "nodes", "casts")
    _refuse_unknown(path, content, allowed)
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            _refuse_unknown(path, row, (*_FIELDS, "source"))
        for name, kind in _FIELDS.items():
            if not (isinstance(row, dict) and isinstance(row.get(name), kind)):
                what = "a text" if kind is str else "a number"
                raise UserError(f"{path}: node {number + 1} needs {name}, {what}.")
        if not all(0 <= row[name] < math.inf for name in ("low_ms", "fp32_ms")):
            raise UserError(f"{path}: {row['name']} has times that are none.")
        for name, words in (("runs_in", (dtype, "fp32")), ("kind", KINDS)):
            if row[name] not in words:
                raise UserError(
                    f"{path}: {row['name']} has {name} = {row[name]!r}; it must be "
                    f"{' or '.join(words)}."
                )
    return rows


def _refuse_unknown(
    path: str | PathLike[str], given: dict[str, Any], allowed: Sequence[str]
) -> None:
    """Reject unknown keys."""
    for name in given:
        if name not in allowed:
            raise UserError(f"{path}: {name!r} must be one of {', '.join(allowed)}.")


def _place(row: dict[str, Any]) -> str:
    return f"{row['name']} ({row['op']} of {row['module'] or 'the model'})"

"""What a graph of the last loss showed, as the value that a replay gives too.

In: the `GraphCause` of a loss. Out: a `BadOp`, as far as the graph tells: it knows no
modules but by the parameters that an operation takes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from halfstep.nonfinite.origin import BadOp

if TYPE_CHECKING:
    from halfstep.nonfinite.graph import GraphCause

_CAUSES = {
    "data": "data",
    "weights": "weight",
    "zero": "zero",
    "range": "forward range",
    "learning rate": "learning rate",
    "loss": "loss function",
}
_OP_WITH_PARAMS = re.compile(r"(?P<op>[a-z]\w*) \((?P<names>[^)]*)\)")
"""An operation and the parameters that it takes itself."""


def to_origin(cause: GraphCause, scale: float, *, finite: bool | None) -> BadOp:
    """Return what is known of the first bad operation without a replay.

    Args:
        cause: Of the graph, or of the losses so far.
        scale: Loss scale of the last backward pass.
        finite: Whether the last loss was; None if it is not known.
    """
    module, op, evidence = "model", "", f"{cause.where}: {cause.evidence}"
    op_with_params = _OP_WITH_PARAMS.fullmatch(cause.where)
    if op_with_params is not None:
        modules = {
            name.rpartition(".")[0] for name in op_with_params["names"].split(", ")
        }
        op = op_with_params["op"]
        if len(modules) == 1:
            module, evidence = modules.pop() or "model", cause.evidence
    elif cause.cause == "weights":
        module = cause.where.rpartition(".")[0] or "model"
    elif cause.cause == "loss":
        module = "loss"
    phase = {"data": "input", "weights": "weight"}.get(cause.cause, "forward")
    # A finite loss hides an exp that overflowed, not a slope that is infinite.
    if phase == "forward" and finite and cause.cause != "range":
        phase = "backward"
    return BadOp(
        phase=phase,
        module=module,
        op=op,
        scale=scale,
        nonfinite_kind=cause.nonfinite_kind,
        cause=_CAUSES[cause.cause],
        evidence=evidence,
        advice=cause.advice,
        reproduced=False,
        rule=cause.rule,
    )

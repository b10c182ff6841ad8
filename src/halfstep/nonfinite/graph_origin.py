"""What a graph of the last loss showed, as the value that a replay gives too.

In: a `Finding` of the autopsy. Out: a `BadOp`, as far as the graph tells: it knows no
modules but by the parameters that an operation takes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from halfstep.nonfinite.origin import BadOp

if TYPE_CHECKING:
    from halfstep.nonfinite.graph import Finding

_CAUSES = {
    "data": "data",
    "weights": "weight",
    "zero": "zero",
    "range": "forward range",
    "learning rate": "learning rate",
    "loss": "loss function",
}
_OWN = re.compile(r"(?P<op>[a-z]\w*) \((?P<names>[^)]*)\)")
"""An operation and the parameters that it takes itself."""


def bad_op(finding: Finding, scale: float, *, finite: bool | None) -> BadOp:
    """Return what is known of the first bad operation without a replay.

    Args:
        finding: Of the graph, or of the losses so far.
        scale: Loss scale of the last backward pass.
        finite: Whether the last loss was; None if it is not known.
    """
    module, op, evidence = "model", "", f"{finding.where}: {finding.evidence}"
    own = _OWN.fullmatch(finding.where)
    if own is not None:
        modules = {name.rpartition(".")[0] for name in own["names"].split(", ")}
        op = own["op"]
        if len(modules) == 1:
            module, evidence = modules.pop() or "model", finding.evidence
    elif finding.cause == "weights":
        module = finding.where.rpartition(".")[0] or "model"
    elif finding.cause == "loss":
        module = "loss"
    phase = {"data": "input", "weights": "weight"}.get(finding.cause, "forward")
    # A finite loss hides an exp that overflowed, not a slope that is infinite.
    if phase == "forward" and finite and finding.cause != "range":
        phase = "backward"
    return BadOp(
        phase=phase,
        module=module,
        op=op,
        scale=scale,
        made=finding.made,
        cause=_CAUSES[finding.cause],
        evidence=evidence,
        advice=finding.advice,
        reproduced=False,
        rule=finding.rule,
    )

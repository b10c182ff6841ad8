"""Decides the dtype in which an operation or a module runs, and gives the reason.

All of halfstep uses these functions; no other code decides dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.errors import UserError
from halfstep.numerics.formats import AUTOCAST_DTYPES
from halfstep.policy import op_tables
from halfstep.policy.rules import KEEP, TORCH, Policy, _spellings
from halfstep.reporting.table import Report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Decision(Report):
    """The dtype in which an operation or module runs, and the reason."""

    dtype: torch.dtype | None
    """Dtype that floating operands are cast to; None: they are not cast."""
    category: str
    """Category of the rule or of the table's entry. Entries may also have "follow"
    (the first operand's dtype) and "fp32_result" (fp32 result, operands not cast)."""
    reason: str
    """Why, in words."""
    row: str
    """The rule or the table's entry that decided, as text."""


def decide(
    op: str | None,
    dtypes: Sequence[torch.dtype],
    device: str,
    *,
    policy: Policy = TORCH,
    low: torch.dtype = torch.bfloat16,
    module: str = "",
    types: Sequence[str] = (),
) -> Decision:
    """Return the dtype in which an operation, or a module as a whole, runs.

    The first of these that matches decides: the policy's rules, in order, each against
    the module's path, its types and the operation; the policy's table for the device.
    Otherwise the operation runs as it is called.

    Args:
        op: Name in `torch.ops.aten`, with overload where the table has it
            ("softmax.int"), or of another library ("ns::name"). None asks about a
            module as a whole, which only rules can decide.
        dtypes: Dtypes of the floating operands, in order.
        device: "cpu", "cuda", "mps" or "xpu".
        policy: Rules and table. Default: torch's table without rules.
        low: The 16-bit dtype of the context. Default: bf16.
        module: Path of the module that runs it; "" is the model itself. A rule that
            matches an enclosing module applies too.
        types: Class names of that module and the enclosing ones, bases included.

    Raises:
        UserError: If there is no table for the device.

    Example:
        >>> decision = decide("mm", [torch.float32, torch.float32], "cpu")
        >>> decision.dtype, decision.row
        (torch.bfloat16, 'torch cpu table: mm=low')
        >>> policy = Policy.parse("torch + module:head=fp32")
        >>> decide("mm", [torch.float32], "cpu", policy=policy, module="head").dtype
        torch.float32
    """
    if device not in op_tables.TABLES:
        raise UserError(
            f"device={device!r} has no table; choose {', '.join(op_tables.TABLES)}."
        )
    op = op.removeprefix("aten::") if op else None
    index = deciding_rule(policy, module, types, op=op)
    table = op_tables.NAMED[policy.base][device]
    row = table.get(op or "")
    if index is not None:
        rule = policy.rules[index]
        category, reason, text = rule.category, rule.reason, str(rule)
    else:
        category = row.category if row else KEEP
        reason = row.reason if row else "no row: it runs as it is called"
        overloads = [name for name in table if op and name.startswith(f"{op}.")]
        if overloads and not row:
            reason += f"; the table has {', '.join(overloads)}"
        text = f"{policy.base} {device} table: {op}={category}" if op else "no row"
    return Decision(cast_to(category, dtypes, low), category, reason, text)


def deciding_rule(
    policy: Policy,
    module: str = "",
    types: Sequence[str] = (),
    *,
    op: str | None = None,
) -> int | None:
    """Return the index in `policy.rules` of the first rule that applies, or None.

    Args:
        policy: Its rules.
        module: Path, as for `decide`.
        types: Class names, as for `decide`.
        op: Name, as for `decide`. None: rules for operations do not apply.

    Example:
        >>> policy = Policy.parse("lean + op:mm=fp32 + module:head=fp32")
        >>> deciding_rule(policy, "head.linear")
        1
    """
    if not policy.rules:
        return None
    names: Mapping[str, Sequence[str]] = {
        "op": _spellings(op) if op else (),
        "module": around(module),
        "type": types,
    }
    for index, rule in enumerate(policy.rules):
        if rule.matches(rule.kind, names[rule.kind]):
            return index
    return None


def around(module: str) -> list[str]:
    """Return a module's path and those of its enclosing modules, the model's "" too.

    Example:
        >>> around("encoder.layers.0")
        ['encoder.layers.0', 'encoder.layers', 'encoder', '']
    """
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def cast_to(
    category: str, dtypes: Sequence[torch.dtype], low: torch.dtype
) -> torch.dtype | None:
    """Return the dtype that a category casts floating operands to; None: no cast."""
    if category == op_tables.FOLLOW:
        return dtypes[0] if dtypes and dtypes[0] in AUTOCAST_DTYPES else None
    if category == op_tables.FP32_IN_FP16:
        category = op_tables.FP32 if low == torch.float16 else KEEP
    eligible = [dtype for dtype in dtypes if dtype in AUTOCAST_DTYPES]
    if not eligible or category in (KEEP, op_tables.FP32_RESULT, op_tables.BANNED):
        return None
    if category == op_tables.PROMOTE:
        # torch raises on a mix of bf16 and fp16; fp32 represents both exactly.
        return low if set(eligible) == {low} else torch.float32
    return low if category == op_tables.LOW else torch.float32

"""Makes the table of `session.explain()`: dtypes per module type, and the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.numerics import formats
from halfstep.policy import op_tables
from halfstep.policy.decision import around, decide, deciding_rule
from halfstep.policy.rules import Policy, type_names
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from halfstep.machine.recommendation import Choice

_COLUMNS = ("module", "count", "parameters", "stored", "runs in", "why")


def precision_table(
    model: nn.Module,
    choice: Choice,
    policy: Policy,
    device: str,
    notes: Sequence[str],
    *,
    autocast: bool = True,
) -> Table:
    """Return one row for each type of module that holds parameters.

    `autocast` is False if the forward passes so far ran outside the autocast context.
    """
    rows: dict[tuple[str, ...], tuple[int, int]] = {}
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            stored = ", ".join(sorted({formats.word(param.dtype) for param in own}))
            runs = stored, "no forward pass ran inside session.autocast()"
            if autocast:
                runs = _runs_in(model, path, stored, choice, policy, device)
            key = (type(module).__name__, stored, *runs)
            count, numbers = rows.get(key, (0, 0))
            rows[key] = count + 1, numbers + sum(param.numel() for param in own)
    table_rows: list[tuple[Cell, ...]] = [
        (key[0], *rows[key], *key[1:]) for key in sorted(rows)
    ]
    return Table("Precision", _COLUMNS, tuple(table_rows), tuple(notes))


def _runs_in(
    model: nn.Module,
    path: str,
    stored: str,
    choice: Choice,
    policy: Policy,
    device: str,
) -> tuple[str, str]:
    """Return (format that a module runs in, reason)."""
    if stored == "float64":
        return stored, "as stored: no level casts float64"
    types = [
        name
        for outer in around(path)
        for name in type_names(model.get_submodule(outer))
    ]
    rule_index = deciding_rule(policy, path, types)
    if rule_index is not None and choice.level.low:
        rule = policy.rules[rule_index]
        if rule.category == op_tables.FP32:
            return formats.FP32.name, f"rule {rule}"
    if not choice.level.autocast:
        return stored, "as stored: this level has no autocast"
    operation = op_tables.OPERATION_OF.get(type(model.get_submodule(path)).__name__)
    if operation is None:
        return "each operation's own", "it runs several operations"
    low = choice.format.dtype
    decision = decide(
        operation, (low,), device, policy=policy, low=low, module=path, types=types
    )
    runs = "as called" if decision.dtype is None else formats.word(decision.dtype)
    return runs, decision.reason

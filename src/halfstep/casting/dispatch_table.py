"""Computes which operations a policy casts differently from torch, and how.

In: a policy, a device, optionally a module with a rule. Out: operation -> `OpCast`, for
the dispatch kernels.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING

from halfstep.casting import dispatch_kernels
from halfstep.casting.active_context import OpCast
from halfstep.errors import UserError
from halfstep.policy import op_tables, rules
from halfstep.policy.decision import decide, deciding_rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from halfstep.policy.rules import Policy

_NO_WEIGHTS = {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention"}
"""Matmuls of activations only: their casts are not cached."""


@cache
def op_casts_for(
    policy: Policy,
    device: str,
    *,
    module: str = "",
    types: tuple[str, ...] = (),
    cache_weights: bool = False,
    record_all: bool = False,
) -> Mapping[str, OpCast]:
    """Return operation -> cast, for operations that torch's own kernels do not cover.

    Their dispatch kernels are installed when a table is computed for the first time.

    Args:
        policy: The active policy.
        device: Device type.
        module: Path of the module that they run in, if a rule matches it.
        types: Class names of that module and of the enclosing ones.
        cache_weights: Include all operations with weights, to cache their casts.
        record_all: Include all operations of the tables, to record them.
    """
    torch_table = op_tables.TABLES[device]
    policy_table = op_tables.NAMED[policy.base][device]
    low_ops = {op for op, row in policy_table.items() if row.category == op_tables.LOW}
    cached_ops = low_ops - _NO_WEIGHTS if cache_weights else set()
    names = {
        op
        for op in torch_table.keys() | policy_table.keys()
        if not _is_same(torch_table, policy_table, op)
    }
    names |= cached_ops
    for rule in policy.rules:
        if rule.kind == "op":
            names |= {op.removeprefix("aten::") for op in rules.matching_ops(rule)}
    if record_all or deciding_rule(policy, module, types) is not None:
        names |= torch_table.keys() | policy_table.keys()
    rule_texts = [str(rule) for rule in policy.rules]
    op_casts = {}
    for name in sorted(names):
        decision = decide(name, (), device, policy=policy, module=module, types=types)
        index = rule_texts.index(decision.row) if decision.row in rule_texts else None
        category = decision.category
        # A rule's "keep" also applies to operations called inside; torch's does not.
        same_as_torch = (
            category
            == _category(torch_table, name)
            not in {op_tables.PROMOTE, rules.KEEP}
        )
        is_untouched = index is None and _is_same(torch_table, policy_table, name)
        is_torch_default = (same_as_torch or is_untouched) and name not in cached_ops
        op_casts[name] = OpCast(decision.category, index, is_torch_default)
    dispatch_kernels.install(op_casts)
    return op_casts


def _is_same(
    torch_table: Mapping[str, op_tables.Row],
    policy_table: Mapping[str, op_tables.Row],
    op: str,
) -> bool:
    """Return whether torch's kernel casts an operation as a table says."""
    # torch's kernel raises on a mix of bf16 and fp16.
    promotes_mix = (
        policy_table is not torch_table
        and _category(policy_table, op) == op_tables.PROMOTE
    )
    return (
        _category(torch_table, op) == _category(policy_table, op) and not promotes_mix
    )


def _category(table: Mapping[str, op_tables.Row], op: str) -> str:
    return table[op].category if op in table else rules.KEEP


_matched_rules: defaultdict[Policy, set[int]] = defaultdict(set)


def matched_rules(policy: Policy) -> set[int]:
    """Return the indices of a policy's rules that have applied in any context."""
    return _matched_rules[policy]


_warned: set[tuple[Policy, int]] = set()


def unmatched_rule_warning(policy: Policy, matched: set[int] | None = None) -> str:
    """Return a warning about rules that have matched nothing so far, or "".

    Args:
        policy: The active policy.
        matched: Indices of its rules that have matched. None: in any context of the
            process; each rule is then reported once.
    """
    matched_indices = matched_rules(policy) if matched is None else matched
    missing = [
        index for index in range(len(policy.rules)) if index not in matched_indices
    ]
    if matched is None:
        missing = [index for index in missing if (policy, index) not in _warned]
        _warned.update((policy, index) for index in missing)
    if not missing:
        return ""
    text = ", ".join(repr(str(policy.rules[index])) for index in missing)
    return (
        f"policy rule {text} matched nothing: no such operation or module ran in the "
        "context. An operation inside another, as addmm in linear, follows the outer."
    )


def check_policy(policy: Policy, device: str, model: nn.Module | None) -> None:
    """Raise if a context cannot apply a policy.

    Raises:
        UserError: If an operation's name is unknown, the device has no table, or there
            are module or type rules and no model.
    """
    _check_ops(policy)
    check_device(policy, device)
    module_rules = [str(rule) for rule in policy.rules if rule.kind != "op"]
    if module_rules and model is None:
        raise UserError(
            f"rule {module_rules[0]!r} names a module, and this context has no model: "
            "pass autocast(..., model=model), or prepare(model, ..., policy=...)."
        )


_check_ops = cache(rules.check_ops)  # it takes milliseconds per rule


def check_device(policy: Policy, device: str) -> None:
    """Raise if a device has no op table.

    Raises:
        UserError: With the devices that have one.
    """
    if device not in op_tables.TABLES:
        raise UserError(
            f"policy={str(policy)!r}: device {device!r} has no table of operations; "
            f"choose one of {', '.join(op_tables.TABLES)}, or leave the policy out."
        )

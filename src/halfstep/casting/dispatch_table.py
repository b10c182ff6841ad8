"""Which operations a policy takes out of torch's hands, and how they run instead.

In: a policy, a device, perhaps a module that a rule speaks of. Out: the rows that the
kernels look up.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING

from halfstep.casting.active_context import Row
from halfstep.errors import UserError
from halfstep.policy import op_tables, rules
from halfstep.policy.decision import decide, deciding_rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from halfstep.policy.rules import Policy

_NO_WEIGHTS = {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention"}
"""Matrix products of activations alone: no cast of theirs is worth keeping."""


def rows_for(
    steered: Policy,
    device: str,
    *,
    module: str = "",
    types: Sequence[str] = (),
    weights: bool = False,
    everything: bool = False,
) -> Mapping[str, Row]:
    """Return how operations run, for those that torch's own kernels do not serve.

    Args:
        steered: The policy in force.
        device: "cpu", "cuda", ...
        module: Path of the module that they run in, if a rule speaks of it.
        types: Class names of that module and of those around it.
        weights: Take in all that multiply by weights, for a cache of their casts.
        everything: Take in all that have a row, to observe them.
    """
    ruling = deciding_rule(steered, module, types)
    inside = None if ruling is None else (ruling, module, tuple(types))
    return _rows(steered, device, inside, weights, everything)


@cache
def _rows(
    steered: Policy,
    device: str,
    inside: tuple[int, str, tuple[str, ...]] | None,
    weights: bool,
    everything: bool,
) -> Mapping[str, Row]:
    own = op_tables.TABLES[device]
    base = op_tables.NAMED[steered.base][device]
    low = {op for op, row in base.items() if row.category == op_tables.LOW}
    kept = low - _NO_WEIGHTS if weights else set()
    names = {op for op in own.keys() | base.keys() if not _same(own, base, op)}
    names |= kept
    for rule in steered.rules:
        if rule.kind == "op":
            names |= {op.removeprefix("aten::") for op in rules.matching_ops(rule)}
    if inside or everything:
        names |= own.keys() | base.keys()
    module, types = inside[1:] if inside else ("", ())
    words = [str(rule) for rule in steered.rules]
    rows = {}
    for name in sorted(names):
        decision = decide(name, (), device, policy=steered, module=module, types=types)
        index = words.index(decision.row) if decision.row in words else None
        category = decision.category
        # A rule's "keep" holds for what the operation calls inside, torch's does not.
        alike = category == _word(own, name) not in {op_tables.PROMOTE, rules.KEEP}
        untouched = index is None and _same(own, base, name)
        stock = (alike or untouched) and name not in kept
        rows[name] = Row(decision.category, index, stock)
    return rows


def _same(
    own: Mapping[str, op_tables.Row], base: Mapping[str, op_tables.Row], op: str
) -> bool:
    """Say whether torch's kernel does what a table asks for."""
    # torch's refuses to promote a mix of the two 16-bit formats.
    mixes = base is not own and _word(base, op) == op_tables.PROMOTE
    return _word(own, op) == _word(base, op) and not mixes


def _word(table: Mapping[str, op_tables.Row], op: str) -> str:
    return table[op].category if op in table else rules.KEEP


_matches: defaultdict[Policy, set[int]] = defaultdict(set)


def matches(steered: Policy) -> set[int]:
    """Return the indices of the rules that have decided something, anywhere."""
    return _matches[steered]


_told: set[tuple[Policy, int]] = set()


def unmatched(steered: Policy, matched: set[int] | None = None) -> str:
    """Return what to tell of rules that have matched nothing so far; "" of none.

    Args:
        steered: The policy in force.
        matched: Indices of its rules that have; None: those of all regions, and each
            rule is told of once.
    """
    found = matches(steered) if matched is None else matched
    missed = [index for index in range(len(steered.rules)) if index not in found]
    if matched is None:
        missed = [index for index in missed if (steered, index) not in _told]
        _told.update((steered, index) for index in missed)
    if not missed:
        return ""
    words = ", ".join(repr(str(steered.rules[index])) for index in missed)
    return (
        f"policy rule {words} matched nothing: no such operation or module ran in the "
        "region. An operation inside another, as addmm in linear, follows the outer."
    )


def check(steered: Policy, device: str, model: nn.Module | None) -> None:
    """Refuse a policy that a bare region cannot obey.

    Raises:
        UserError: If an operation's name is unknown, the device has no table, or rules
            speak of modules and there is no model.
    """
    _check_ops(steered)
    check_device(steered, device)
    about = [str(rule) for rule in steered.rules if rule.kind != "op"]
    if about and model is None:
        message = (
            f"rule {about[0]!r} speaks of modules, and a bare region knows none: pass "
            "autocast(..., model=model), or use prepare(model, ..., policy=...)."
        )
        raise UserError(message)


@cache
def _check_ops(steered: Policy) -> None:
    """Check a policy's operations once: it takes milliseconds a rule."""
    rules.check_ops(steered)


def check_device(steered: Policy, device: str) -> None:
    """Refuse a policy on a device without a table.

    Raises:
        UserError: With the devices that have one.
    """
    if device not in op_tables.TABLES:
        message = (
            f"policy={str(steered)!r}: device {device!r} has no table of operations; "
            f"choose one of {', '.join(op_tables.TABLES)}, or leave the policy out."
        )
        raise UserError(message)

"""Which operations a policy takes out of torch's hands, and how they run instead."""

from typing import Any

import pytest
from torch.library import Library

from halfstep.casting.dispatch_table import (
    check_policy,
    op_casts_for,
)
from halfstep.errors import UserError
from halfstep.policy import LEAN as LEAN_ONLY
from halfstep.policy import TORCH, Policy, op_tables
from halfstep.policy.op_tables import LEAN, LOW, PROMOTE, TABLES
from halfstep.policy.rules import KEEP

DEVICES = pytest.mark.parametrize("device", TABLES)


def parse(*words: str) -> Policy:
    return Policy.parse(" + ".join(words))


def word(table: dict[str, op_tables.Row], op: str) -> str:
    return table[op].category if op in table else KEEP


@DEVICES
def test_torchs_table_steers_nothing(device: str) -> None:
    """Law: what torch does by itself it does without us."""
    assert op_casts_for(TORCH, device) == {}


@DEVICES
def test_lean_steers_what_differs(device: str) -> None:
    """Law: of lean, just the rows that torch's table has otherwise, or fails at."""
    own, lean = TABLES[device], LEAN[device]
    differ = {op for op in own.keys() | lean.keys() if word(own, op) != word(lean, op)}
    # torch refuses to promote a mix of 16-bit formats.
    differ |= {op for op in lean if word(lean, op) == PROMOTE}
    rows = op_casts_for(LEAN_ONLY, device)
    assert rows.keys() == differ
    assert not any(
        row.is_torch_default or row.rule_index is not None for row in rows.values()
    )


@DEVICES
def test_weights_take_in_products(device: str) -> None:
    """Law: a cache of casts sees every product with weights, and no attention."""
    rows = op_casts_for(TORCH, device, cache_weights=True)
    low = {op for op, row in TABLES[device].items() if row.category == LOW}
    attention = "scaled_dot_product_attention", "_scaled_dot_product_flash_attention"
    assert rows.keys() == low.difference(attention)
    assert "linear" in rows
    assert not any(row.is_torch_default for row in rows.values())


@DEVICES
def test_everything_takes_in_all_rows(device: str) -> None:
    """Law: to be observed, each operation with a row; those of torch run as torch's."""
    rows = op_casts_for(TORCH, device, record_all=True)
    assert rows.keys() == TABLES[device].keys()
    assert all(row.is_torch_default for row in rows.values())
    assert op_casts_for(LEAN_ONLY, device, record_all=True).keys() == (
        TABLES[device].keys() | LEAN[device].keys()
    )


def test_operators_that_come_later() -> None:
    """Law: a refused name is asked for again: a library may have come since."""
    policy = Policy.parse("torch + op:halfstep_test_steering::late=low")
    with pytest.raises(UserError, match="matches no operation"):
        check_policy(policy, "cpu", None)
    library: Any = Library("halfstep_test_steering", "DEF")  # type: ignore[no-untyped-call]
    library.define("late(Tensor x) -> Tensor")
    check_policy(policy, "cpu", None)
    library._destroy()

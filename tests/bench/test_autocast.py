"""`halfstep bench autocast`: its candidates do the same work, and its tables."""

import pytest
import torch
from bench_runs import rows, tables

import halfstep as hs
from halfstep.bench.autocast import ruled_operations, stock_operations

LOW = torch.bfloat16
RULED = ruled_operations(4, "cpu", LOW)


def same(one: object, other: object) -> bool:
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", stock_operations(4, "cpu"))
def test_stock_operations_are_the_same(name: str) -> None:
    """Law: in both contexts a stock operation returns the same bits."""
    call = stock_operations(4, "cpu")[name]
    with torch.autocast("cpu", LOW):
        theirs = call()
    with hs.autocast("cpu", LOW):
        assert same(theirs, call())


@pytest.mark.parametrize("rule", RULED)
def test_by_hand_is_what_the_rule_says(rule: str) -> None:
    """Law: by hand means what the rule does, and neither is what torch does."""
    call, call_by_hand = RULED[rule]
    with torch.autocast("cpu", LOW):
        theirs, by_hand = call(), call_by_hand()
    with hs.autocast("cpu", LOW, policy=f"torch + {rule}"):
        ours = call()
    assert same(by_hand, ours)
    assert not same(theirs, ours)


def test_tables() -> None:
    """Law: each operation at each size and each kind of context has a row.

    The targets stand beside what was measured, and the verdicts follow from both.
    """
    words = "--sizes 2,3 --calls 2 --rounds 3 --device cpu"
    stock, contexts, under = made = tables("autocast", words)
    titles = ["Stock operations", "Autocast contexts", "Operations under a rule"]
    assert [table.title for table in made] == titles
    names = list(stock_operations(2, "cpu"))
    assert [row[:2] for row in stock.rows] == [(n, s) for s in (2, 3) for n in names]
    assert [row[:2] for row in under.rows] == [(r, s) for s in (2, 3) for r in RULED]
    kinds = ("torch.autocast", "hs.autocast", "hs.autocast with a rule")
    assert [row[0] for row in contexts.rows] == [
        f"{kind}, {use}" for kind in kinds for use in ("reused", "made each time")
    ]
    assert contexts.rows[0][2:] == (1.0, 0.0)
    for table in made:
        assert any(f"halfstep bench autocast {words[:9]}" in n for n in table.notes)
        assert any(note.endswith(", threads: 1") for note in table.notes)
        assert any("median of 3 rounds" in note for note in table.notes)
    targets = ((stock, "x torch", 1.05), (under, "over by hand us", 7.0))
    for table, value, limit in targets:
        for row in rows(table):
            assert row[f"within {limit:g}"] is (row[value] <= limit)  # type: ignore[operator]

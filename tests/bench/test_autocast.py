"""`halfstep bench autocast`: its contenders do the same work, and its tables."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

import halfstep as hs
from halfstep.bench import autocast
from halfstep.bench.op_cases import ruled_operations, stock_operations

LOW = torch.bfloat16
PLACE = autocast.Setup("cpu", LOW, calls=2, rounds=2)
RULED = {each.rule: each for each in ruled_operations(4, "cpu", LOW)}


def same(one: object, other: object) -> bool:
    """Say whether two tensors agree in dtype and in every bit."""
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", stock_operations(4, "cpu"))
def test_stock_operations_are_the_same(name: str) -> None:
    """Law: in both regions a stock operation returns the same bits."""
    call = stock_operations(4, "cpu")[name]
    with PLACE.torch_context():
        theirs = call()
    with PLACE.halfstep_context():
        ours = call()
    assert same(theirs, ours)


@pytest.mark.parametrize("rule", RULED)
def test_by_hand_is_what_the_rule_says(rule: str) -> None:
    """Law: by hand means what the rule does, and neither is what torch does."""
    ruled = RULED[rule]
    with PLACE.torch_context():
        theirs, by_hand = ruled.call(), ruled.by_hand()
    with PLACE.halfstep_context(f"torch + {rule}"):
        ours = ruled.call()
    assert same(by_hand, ours)
    assert not same(theirs, ours)


RULES = {
    "cpu": {"gelu": "fp32", "add": "low", "linear": "fp32"}
    | {"layer_norm": "fp32", "mv": "low"},
    "cuda": {"gelu": "fp32", "add": "low", "linear": "fp32", "layer_norm": "low"},
}


@pytest.mark.parametrize("device", RULES)
def test_rules_change_something(device: str) -> None:
    """Law: no rule asks for what torch's table for the device says already."""
    for op, category in RULES[device].items():
        assert hs.policy.decide(op, (), device).category != category


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rules(device: str) -> None:
    """Law: the rules measured on a device are those."""
    made = [each.rule for each in ruled_operations(4, device, LOW)]
    assert made == [f"op:{op}={run}" for op, run in RULES[device].items()]


def test_turns_last_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: slow calls are made less often, but at least once; quick ones as asked."""
    place = autocast.Setup("cpu", LOW, calls=50, rounds=1)
    for seconds, calls in ((1e-6, 50), (0.01, 5), (9.0, 1)):
        monkeypatch.setattr(autocast, "_inside", lambda *_, s=seconds: s)
        assert autocast._calls(lambda: None, place) == calls


def flags(**given: object) -> Namespace:
    """Return what the command line gives, for few calls."""
    return Namespace(**given, calls=2, threads=1, dtype="bf16", device="cpu")


def test_tables() -> None:
    """Law: each operation at each size and each kind of region has a row."""
    stock, regions, under, passed = autocast.tables(flags(sizes=[2, 3], rounds=2))
    titles = [t.title for t in (stock, regions, under, passed)]
    assert titles == [
        "Stock operations",
        "Regions",
        "Operations under a rule",
        "Operations passed on",
    ]
    names = list(stock_operations(2, "cpu"))
    assert [row[:2] for row in stock.rows] == [(n, s) for s in (2, 3) for n in names]
    assert [row[:2] for row in under.rows] == [(r, s) for s in (2, 3) for r in RULED]
    assert {row[0] for row in passed.rows} == RULES["cpu"].keys()
    assert [row[0] for row in regions.rows] == [
        "torch.autocast, reused",
        "torch.autocast, made each time",
        "hs.autocast, reused",
        "hs.autocast, made each time",
        "hs.autocast with a rule, reused",
        "hs.autocast with a rule, made each time",
    ]
    assert regions.rows[0][2:] == (1.0, 0.0)
    command = "halfstep bench autocast --sizes 2,3 --rounds 2 --calls 2 --threads 1"
    for table in (stock, regions, under, passed):
        assert f"{command} --dtype bf16 --device cpu" in table.notes
        assert any(note.endswith(", threads: 1") for note in table.notes)
        assert any("median of 2 rounds" in note for note in table.notes)


def test_targets_are_told() -> None:
    """Law: the targets stand beside what was measured, and are judged by it."""
    found = autocast.tables(flags(sizes=[2], rounds=3))
    stock, _, under, _ = (table.data() for table in found)
    for table, value, limit, verdict in (
        (stock, "x torch", 1.05, "within 1.05"),
        (under, "over by hand us", 7.0, "within 7"),
    ):
        rows = table["rows"]
        assert isinstance(rows, list)
        assert rows
        for row in rows:
            assert row[verdict] is (row[value] <= limit)

"""Planted faults: module, operation and cause are told; healthy runs raise no alarm."""

import re
from collections.abc import Iterator

import pytest
import torch
from planted_faults import FAULTS, HEALTHY, planted
from processes import group_of_one
from required import required

from halfstep.nonfinite.origin import BadOp
from halfstep.policy import Policy

PLACES, REASONS = 0.95, 0.90
"""Least shares of faults whose module and operation, and whose cause, are right."""
STRUCK = [name for name, fault in FAULTS.items() if fault.cause == "hardware"]
MOST_ROWS = 8
"""After which rows count as no cure."""


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> Iterator[None]:
    """Be a process group of one, for DDP."""
    with group_of_one():
        yield


@pytest.fixture(scope="module")
def found() -> dict[str, BadOp]:
    return {name: required(planted(name, failed=True).found()) for name in FAULTS}


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in STRUCK])
def test_each_fault_is_one(name: str) -> None:
    """Law: what is planted spoils loss or gradients, as torch alone sees them."""
    loss, gradient = planted(name).spoilt()
    assert loss or gradient
    assert not (loss and FAULTS[name].phase == "backward")


def test_places_and_causes(found: dict[str, BadOp]) -> None:
    """Law: module and operation are right for 95 % of the faults, causes for 90 %."""
    verdicts = {name: FAULTS[name].judge(bad) for name, bad in found.items()}
    misplaced = {n: str(found[n]) for n, v in verdicts.items() if not (v[0] and v[1])}
    assert len(misplaced) <= (1 - PLACES) * len(FAULTS), misplaced
    wrong = {n: str(found[n]) for n, v in verdicts.items() if not v[2]}
    assert len(wrong) <= (1 - REASONS) * len(FAULTS), wrong


def test_healthy_runs_raise_no_alarm() -> None:
    """Law: infinities that are meant, or that reach nothing, are no faults."""
    alarms = {name: planted(name).found() for name in HEALTHY}
    assert not {name: str(bad) for name, bad in alarms.items() if bad is not None}


def test_a_wrong_answer_is_noticed(found: dict[str, BadOp]) -> None:
    """Law: the judge can say no: of another fault's answer, and of none."""
    fault = FAULTS["mlp overflow eager"]
    assert fault.judge(found["mlp overflow eager"]) == (True, True, True)
    assert fault.judge(found["mlp root eager"]) == (True, False, False)
    assert fault.judge(found["cnn div eager"]) == (False, False, False)
    assert fault.judge(None) == (False, False, False)


def test_every_sentence_is_whole(found: dict[str, BadOp]) -> None:
    """Law: an answer names its place, gives evidence with a number, and advises."""
    for name, bad in found.items():
        text = str(bad)
        assert text.startswith(bad.module), text
        assert bad.evidence in text
        assert re.search(r"\d| two | inf", bad.evidence), text
        assert text.endswith("."), text
        assert bad.reproduced == (FAULTS[name].cause != "hardware")
        assert not bad.rule or f"rule '{bad.rule}'" in bad.advice
        assert not bad.rule or Policy.parse(f"torch + {bad.rule}")
        assert BadOp.from_data(bad.data()) == bad
        finding = bad.finding()
        assert (finding.where, finding.severity == "note") == (bad.place, bad.normal)


RANGE = [
    name
    for name, fault in FAULTS.items()
    if (fault.cause == "forward range" and fault.curable)
    or fault.cause == "backward range"
]


@pytest.mark.parametrize("name", RANGE)
def test_the_advised_rows_cure_it(name: str, found: dict[str, BadOp]) -> None:
    """Law: a row that is advised ends the overflow there; some rows end them all.

    What may be left is an overflow of gradients, which a smaller loss scale cures.
    Numbers that stay large overflow again where the next module casts them: then that
    one is named, until there is none, or nothing that a row can match.
    """
    fault, bad = FAULTS[name], found[name]
    if fault.cause == "backward range":
        assert bad.normal != bool(bad.rule)
    rules: list[str] = []
    last: BadOp | None = bad
    while last is not None and last.rule:
        assert last.rule not in rules, str(last)
        rules.append(last.rule)
        assert len(rules) <= MOST_ROWS
        last = planted(name, rule=" + ".join(rules)).found()
    remedy = last is not None and "train in bfloat16" in last.advice
    in_backward = fault.cause == "backward range"
    assert last is None or last.normal or (in_backward and remedy), (rules, str(last))
    assert len(rules) == 1 or not fault.at_once, rules


def test_what_is_advised_ends_it(found: dict[str, BadOp]) -> None:
    """Law: where bfloat16, or a smaller scale, is advised, the same step is finite.

    For a forward overflow bfloat16 is advised where fp32 makes the result finite.
    """
    causes = set()
    for name, bad in found.items():
        # What the model's own code casts to float16 stays there.
        bfloat16 = "train in bfloat16" in bad.advice and FAULTS[name].curable
        if FAULTS[name].cause == "forward range" and FAULTS[name].curable:
            assert bfloat16 == (bad.wide == "finite"), name
        causes |= {bad.cause} if bfloat16 or bad.normal else set()
        changes = {"dtype": torch.bfloat16} if bfloat16 else {}
        for field, value in (changes | ({"scale": 1.0} if bad.normal else {})).items():
            run = planted(name)
            setattr(run, field, value)
            assert run.found() is None, name
    ranges = {"forward range", "backward range", "learning rate"}
    assert causes == {*ranges, "data", "loss function"}

"""What a rule's pattern matches: globs, regular expressions, paths, operations."""

from __future__ import annotations

import fnmatch
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.policy import TORCH, Policy, Rule, around, decide, op_tables

PIECES = st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]", "[", "/", "-", "("])
NAMES = st.text("ab./-([", max_size=6)


@given(pattern=st.lists(PIECES, min_size=1, max_size=5).map("".join), name=NAMES)
def test_globs_match_as_fnmatch(pattern: str, name: str) -> None:
    """Law: a pattern without slashes around it matches as fnmatch does."""
    assume(pattern[0] != "/" or pattern[-1] != "/")
    rule = Rule("type", pattern, "fp32")
    assert rule.matches("type", [name]) == fnmatch.fnmatchcase(name, pattern)
    assert not rule.matches("module", [name])


@given(
    parts=st.lists(
        st.sampled_from(["a", "b", r"\.", ".", "*", "+", "(", ")", "|", "[ab]", "$"]),
        max_size=6,
    ),
    name=NAMES,
)
def test_expressions_match_as_re(parts: list[str], name: str) -> None:
    """Law: a pattern between slashes matches the whole name, as re.fullmatch does."""
    inner = "".join(parts)
    try:
        expected = re.fullmatch(inner, name) is not None
    except re.error:
        with pytest.raises(UserError, match="is not a regular expression"):
            Rule("type", f"/{inner}/", "fp32")
    else:
        rule = Rule("type", f"/{inner}/", "fp32")
        assert rule.matches("type", [name]) == expected


def test_flags_of_an_expression() -> None:
    """Law: what stands between the slashes is compiled as it is, flags included."""
    rule = Rule("type", "/(?i)linear|conv/", "fp32")
    assert rule.matches("type", ["LINEAR"])
    assert rule.matches("type", ["Conv"])
    assert not rule.matches("type", ["Linear2"])


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ("op:mm=fp32", True),
        ("op:m*=fp32", True),
        ("op:aten::mm=fp32", True),
        ("op:/m{2}/=fp32", True),
        ("op:/aten::.*/=fp32", True),
        ("op:mm.out=fp32", False),
        ("op:MM=fp32", False),
        ("op:/m/=fp32", False),
        ("module:net.0.attn=fp32", True),
        ("module:net.*=fp32", True),
        ("module:*attn=fp32", True),
        ("module:net=fp32", True),
        ("module:net.0=fp32", True),
        ("module:/net/=fp32", True),
        ("module:*=fp32", True),
        ("module:attn=fp32", False),
        ("module:ne=fp32", False),
        ("module:0.attn=fp32", False),
        (r"module:/net\.[0-3]\..*/=fp32", True),
        (r"module:/net\.[1-3].*/=fp32", False),
        ("module:net.?.attn=fp32", True),
        ("module:mm=fp32", False),
        ("type:Linear=fp32", True),
        ("type:Module=fp32", True),
        ("type:Lin=fp32", False),
    ],
)
def test_what_a_rule_matches(rule: str, matches: bool) -> None:
    """Law: a pattern of its own kind, case kept, `*` across dots; else torch's table.

    A module's path and those of the modules around it count alike.
    """
    found = decide(
        "mm",
        [torch.float32],
        "cpu",
        policy=Policy((Rule.parse(rule),)),
        module="net.0.attn",
        types=("Linear", "Module"),
    )
    if matches:
        assert (found.category, found.row, found.reason) == ("fp32", rule, "your rule")
    else:
        assert (found.category, found.row) == ("low", "torch cpu table: mm=low")
        assert found.reason == op_tables.TABLES["cpu"]["mm"].reason


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("softmax", True),
        ("softmax.int", True),
        ("softmax.*", True),
        ("aten::softmax", True),
        ("aten::softmax.int", True),
        ("/.*soft.*/", True),
        ("softmax.Dimname", False),
        ("softmax.", False),
        ("int", False),
        ("ns::softmax", False),
    ],
)
@pytest.mark.parametrize("op", ["softmax.int", "aten::softmax.int"])
def test_spellings_of_an_operation(op: str, pattern: str, matches: bool) -> None:
    """Law: with and without overload, with and without aten, it is one operation."""
    rules = TORCH + Rule("op", pattern, "low")
    found = decide(op, [torch.float32], "cuda", policy=rules)
    expected = f"op:{pattern}=low"
    table = "torch cuda table: softmax.int=fp32_result"
    assert found.row == (expected if matches else table)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("ns::mm", True),
        ("ns::mm.fast", True),
        ("ns::*", True),
        ("*", True),
        ("mm", False),
        ("aten::mm", False),
    ],
)
def test_operations_of_others(pattern: str, matches: bool) -> None:
    """Law: an operation of another library is named with its namespace."""
    rules = TORCH + Rule("op", pattern, "low")
    found = decide("ns::mm.fast", [torch.float32], "cpu", policy=rules)
    assert found.category == ("low" if matches else "keep")


def test_around() -> None:
    """Law: a module stands in each prefix of its path, and in the model."""
    assert around("encoder.3.attn") == ["encoder.3.attn", "encoder.3", "encoder", ""]
    assert around("") == [""]

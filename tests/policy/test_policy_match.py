"""What a rule's pattern matches, and that a misspelt operation is refused."""

import fnmatch
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.policy import LEAN, TORCH, Policy, Rule, decide, op_tables
from halfstep.policy.rules import check_ops, matching_ops

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


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ("op:mm=fp32", True),
        ("op:aten::mm=fp32", True),
        ("op:/aten::.*/=fp32", True),
        ("op:mm.out=fp32", False),
        ("op:MM=fp32", False),
        ("op:/m/=fp32", False),
        ("module:net.0.attn=fp32", True),
        ("module:net.*=fp32", True),
        ("module:*attn=fp32", True),
        ("module:net.0=fp32", True),
        ("module:/net/=fp32", True),
        ("module:attn=fp32", False),
        ("module:0.attn=fp32", False),
        (r"module:/net\.[0-3]\..*/=fp32", True),
        (r"module:/net\.[1-3].*/=fp32", False),
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
        ("aten::softmax", True),
        ("aten::softmax.int", True),
        ("softmax.Dimname", False),
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


def ops(pattern: str) -> tuple[str, ...]:
    return matching_ops(Rule("op", pattern, "fp32"))


@pytest.fixture
def library() -> Iterator[str]:
    make: Any = torch.library.Library
    own = make("halfstep_test", "DEF")
    own.define("smooth(Tensor x, float by) -> Tensor")
    own.define("smooth.twice(Tensor x, float by, float again) -> Tensor")
    own.define("smooth_(Tensor(a!) x, float by) -> Tensor(a!)")
    yield "halfstep_test"
    own._destroy()


# Which operations


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("mm", ["aten::mm", "aten::mm.dtype"]),
        ("aten::bmm", ["aten::bmm", "aten::bmm.dtype"]),
        ("pow.Scalar", ["aten::pow.Scalar"]),
        ("/(layer|group)_norm/", ["aten::group_norm", "aten::layer_norm"]),
        # A list of tensors, and optional tensors, are operands too.
        ("stack", ["aten::stack"]),
        ("index_put", ["aten::index_put"]),
        # In place, with out=, views, and without a tensor: none to cast.
        ("relu_", []),
        ("mm.out", []),
        ("view", []),
        ("chunk", []),
        ("arange", []),
        ("nonsense", []),
    ],
)
def test_matching_ops(pattern: str, names: list[str]) -> None:
    """Law: full names of those that take a tensor, write none, return no view."""
    assert sorted(ops(pattern)) == names


def test_a_glob_for_all() -> None:
    """Law: `*` means what models call, aten above all, and no machinery of torch."""
    names = ops("*")
    assert len(names) == len({*names}) > 1000
    assert {"aten::mm", "aten::softmax.int", "aten::gru.input"} <= {*names}
    machinery = ("prims::", "quantized::", "profiler::", "c10d::", "_c10d_functional::")
    assert not [name for name in names if name.startswith(machinery)]
    # An independent reading of the schemas, through torch.ops.
    for name in names:
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            call = getattr(getattr(torch.ops.aten, packet), overload or "default")
            assert not call._schema.is_mutable, name
            assert "Tensor" in str(call._schema).split("->", maxsplit=1)[0], name


def test_kernels_without_a_schema() -> None:
    """Law: a kernel for an operation that is not defined hides no others."""
    library = torch.library.Library("halfstep_orphan", "IMPL")
    library.impl("nowhere", lambda x: x, "CPU")
    assert "halfstep_orphan::nowhere" in torch._C._dispatch_get_all_op_names()
    assert ops("halfstep_orphan::*") == ()
    library._destroy()


def test_operations_registered_later(library: str) -> None:
    """Law: operations registered later are seen, named with their namespace."""
    both = (f"{library}::smooth", f"{library}::smooth.twice")
    assert ops(f"{library}::smooth") == both
    assert ops(f"{library}::*") == both
    assert ops(f"{library}::smooth.twice") == both[1:]
    assert not ops("smooth")
    check_ops(LEAN + f"op:{library}::smooth=fp32")


# Which rules pass


def test_rules_that_pass() -> None:
    """Law: known names pass; rules on modules are not this check's business."""
    check_ops(Policy.parse("torch + op:softmax.int=low + op:aten::mm=keep"))
    check_ops(Policy.parse("lean + op:/lay.*norm/=fp32 + op:*_loss=fp32"))
    check_ops(Policy.parse("torch + module:nonsense=fp32 + type:Nonsense=fp32"))


WITHOUT_EFFECT = {
    "op:sofmax=fp32": "matches no operation; did you mean 'op:softmax=fp32'?",
    "op:aten::sofmax.int=low": "matches no operation; did you mean "
    "'op:aten::softmax.int=low'?",
    "op:/zzz+/=low": "matches no operation; write aten's name, as in 'op:softmax', or "
    "'op:library::name'.",
    "op:relu_=low": "matches only operations that write in place, return views or take "
    "no tensor, and those cannot be cast: name others.",
}


@pytest.mark.parametrize(("rule", "message"), WITHOUT_EFFECT.items())
def test_rules_without_effect(rule: str, message: str) -> None:
    """Law: a rule that would change nothing is refused, with what to write."""
    with pytest.raises(UserError) as caught:
        check_ops(TORCH + "op:mm=low" + rule)
    assert str(caught.value) == f"rule {rule!r} {message}"

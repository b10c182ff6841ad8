"""Rules and policies: words and precedence; and what the one decider answers."""

import fnmatch
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.policy import (
    CATEGORIES,
    LEAN,
    TORCH,
    Policy,
    Rule,
    decide,
    op_tables,
    rules,
)
from halfstep.policy.decision import around, deciding_rule
from halfstep.policy.op_tables import FOLLOW, NAMED, TABLES
from halfstep.policy.rules import check_ops, matching_ops

KINDS = ("op", "module", "type")
GLOBS = st.text(min_size=1).filter(lambda text: text[0] != "/" or text[-1] != "/")
EXPRESSIONS = st.text().map(lambda text: f"/{re.escape(text)}/")
RULES = st.builds(
    Rule,
    st.sampled_from(KINDS),
    (GLOBS | EXPRESSIONS).filter(lambda text: " + " not in text),
    st.sampled_from(CATEGORIES),
    st.text(),
)
BASES = st.sampled_from(["torch", "lean"])


# Words


@given(rules=st.lists(RULES, max_size=4), base=BASES)
def test_parse_undoes_str(rules: list[Rule], base: str) -> None:
    """Law: every rule and policy that can be made is spelt by its word, in order."""
    made = Policy(tuple(rules), base)
    assert Policy.parse(str(made)) == made
    assert str(Policy.parse(str(made))) == str(made)
    assert [Rule.parse(str(rule)) for rule in rules] == rules


def test_words_by_hand() -> None:
    """Law: the words are KIND:PATTERN=CATEGORY, and BASE + RULE + RULE."""
    word = "torch + module:a.b:c=d.*=fp32 + type:LayerNorm=low"
    made = Policy.parse(word)
    assert made.rules == (
        Rule("module", "a.b:c=d.*", "fp32"),
        Rule("type", "LayerNorm", "low"),
    )
    assert str(made) == word
    assert Policy.parse("torch") == TORCH == Policy()
    assert Policy.parse("lean") == LEAN != TORCH
    word = r"lean + op:softmax=fp32 + module:/encoder\.[0-3]\..*/=keep"
    softmax = Rule("op", "softmax", "fp32")
    encoder = Rule("module", r"/encoder\.[0-3]\..*/", "keep")
    assert Policy.parse(word) == Policy((softmax, encoder), "lean")
    assert str(Policy.parse(word)) == word
    assert Policy.parse(" torch  +  op:mm=keep ").rules == (Rule("op", "mm", "keep"),)


WRONG: dict[str, Callable[[], object]] = {
    "rule '' is not KIND:PATTERN=CATEGORY": lambda: Rule.parse(""),
    "rule 'mm=fp32' is not KIND:": lambda: Rule.parse("mm=fp32"),
    "rule 'op:=fp32' is not KIND:": lambda: Rule.parse("op:=fp32"),
    "rule 'op:mm' is not KIND:": lambda: Rule.parse("op:mm"),
    "rule 'mm' is not KIND:": lambda: LEAN + "mm",
    "pattern '' must be a glob": lambda: Rule("module", "", "fp32"),
    "pattern 'a + b' must be a glob": lambda: Rule("module", "a + b", "fp32"),
    "kind 'layer' is not one of": lambda: Rule.parse("layer:x=fp32"),
    "'bf16' is not a category; choose one of low, ": lambda: Rule.parse("op:mm=bf16"),
    "'/encoder.(0/' is not a regular": lambda: Rule.parse("module:/encoder.(0/=fp32"),
    "'/a{99999999999}/' is not": lambda: Rule("op", "/a{99999999999}/", "fp32"),
    "policy='' is not known": lambda: Policy.parse(""),
    "policy='Torch' is not known; the named policies are": lambda: Policy((), "Torch"),
    "Rules follow one of them: 'lean + op:mul=fp32'": lambda: Policy.parse(
        "op:mul=fp32"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_rejected(message: str) -> None:
    """Law: what `parse` could not read back cannot be made; what would be right."""
    with pytest.raises(UserError, match=re.escape(message)):
        WRONG[message]()


# Precedence


def test_added_rule_comes_first() -> None:
    """Law: `policy + rule` lets the newcomer decide, and leaves the old policy."""
    old = LEAN + "op:mm=fp32"
    new = old + "op:mm=keep"
    assert decide("mm", [torch.float32], "cpu", policy=new).category == "keep"
    assert decide("mm", [torch.float32], "cpu", policy=old).category == "fp32"
    assert str(new) == "lean + op:mm=keep + op:mm=fp32"


def test_a_module_as_a_whole() -> None:
    """Law: without an operation only rules on modules and types can answer."""
    rules = Policy((Rule("op", "*", "low"), Rule("module", "head", "fp32")))
    found = decide(None, [torch.bfloat16], "cpu", policy=rules, module="head")
    assert (found.category, found.dtype) == ("fp32", torch.float32)
    found = decide(None, [torch.bfloat16], "cpu", policy=rules, module="body")
    assert (found.category, found.dtype, found.row) == ("keep", None, "no row")
    assert found.reason == "no row: it runs as it is called"


@given(
    rules=st.lists(
        st.builds(
            Rule,
            st.sampled_from(KINDS),
            st.sampled_from(["*", "a", "a.b", "?.b", "/a.*/", "B", "C", "mm"]),
            st.sampled_from(CATEGORIES),
        ),
        max_size=5,
    ),
    module=st.sampled_from(["", "a", "a.b", "a.b.c", "c.b"]),
    types=st.sets(st.sampled_from("BC")),
)
def test_deciding_rule_is_decides(
    rules: list[Rule], module: str, types: set[str]
) -> None:
    """Law: the index is that of the rule which `decide` names for the module."""
    made = Policy(tuple(rules))
    index = deciding_rule(made, module, sorted(types))
    found = decide(None, [], "cpu", policy=made, module=module, types=sorted(types))
    assert found.row == ("no row" if index is None else str(rules[index]))
    if index is not None:
        # By hand: no earlier rule speaks of the module, its surroundings or types.
        told = {"op": set(), "module": {*around(module)}, "type": types}
        assert not any(
            rule.matches(rule.kind, told[rule.kind]) for rule in rules[:index]
        )
        assert rules[index].matches(rules[index].kind, told[rules[index].kind])


# Modules


class OwnNorm(nn.LayerNorm):
    """A normalisation layer of somebody's own."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, True) for kind in (nn.BatchNorm1d, nn.SyncBatchNorm, OwnNorm)),
        *((kind, True) for kind in (nn.InstanceNorm2d, nn.RMSNorm, nn.GroupNorm)),
        *((kind, False) for kind in (nn.Linear, nn.Embedding)),
        *((name, True) for name in ("LlamaRMSNorm", "T5LayerNorm", "MyGroupNorm")),
        *((name, False) for name in ("LayerNormalizer", "WeightNorm")),
    ],
)
def test_normalisation_layers(kind: type[nn.Module] | str, expected: bool) -> None:
    """Law: torch's normalisation layers, what derives from them, and names like them.

    The end of a class's name tells one.
    """
    made: Any = type(kind, (nn.Module,), {}) if isinstance(kind, str) else kind
    assert rules.is_normalisation(rules.type_names(made.__new__(made))) == expected


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASTABLE = FLOATS[:3]
OPERATIONS = sorted(
    {op for table in NAMED.values() for rows in table.values() for op in rows}
)


# Casts


@given(
    category=st.sampled_from(CATEGORIES),
    dtypes=st.lists(st.sampled_from(FLOATS), max_size=4),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_dtype_follows_from_category(
    category: str, dtypes: list[torch.dtype], low: torch.dtype
) -> None:
    """Law: the category and the operands that autocast sees give the dtype."""
    rules = Policy((Rule("op", "x", category),))
    found = decide("x", dtypes, "cpu", policy=rules, low=low).dtype
    seen = [dtype for dtype in dtypes if dtype != torch.float64]
    if category in ("keep", "banned") or not seen:
        assert found is None
    elif category == "promote":
        # No operand may lose a digit or range.
        assert all(torch.promote_types(found or low, dtype) == found for dtype in seen)
        assert found in (low, torch.float32)
        assert (found == low) == all(dtype == low for dtype in seen)
    else:
        assert found == {"low": low, "fp32": torch.float32}[category]


def test_unknown_device() -> None:
    """Law: a device without a table is refused with those that have one."""
    with pytest.raises(UserError) as caught:
        decide("mm", [torch.float32], "tpu")
    assert str(caught.value) == (
        "device='tpu' has no table; choose cpu, cuda, mps, xpu."
    )


@pytest.mark.parametrize("operation", ["layer_norm", "softmax.int"])
def test_follow(operation: str) -> None:
    """Law: the first operand decides, where autocast sees it; else nothing is cast."""
    for first, others in product(FLOATS, [(), *product(FLOATS)]):
        found = decide(operation, [first, *others], "cpu", policy=LEAN)
        assert found.category == FOLLOW
        assert found.dtype == (first if first in CASTABLE else None)
    assert decide(operation, [], "cpu", policy=LEAN).dtype is None


def test_powers_leave_the_range_of_fp16_alone() -> None:
    """Law: lean takes a power in fp32 where the format is fp16, and as called in bf16.

    40 ** 3 = 64000 fits fp16, 41 ** 3 = 68921 is above its largest number, 65504.
    """
    for low, dtype in ((torch.float16, torch.float32), (torch.bfloat16, None)):
        found = decide("pow.Tensor_Scalar", [low], "cpu", policy=LEAN, low=low)
        assert found.dtype == dtype
        x = torch.tensor([40.0, 41.0], dtype=low)
        with hs.autocast("cpu", low, policy="lean"):
            cubes = x**3
        assert cubes.dtype == (dtype or low)
        assert cubes.isfinite().all()


@given(
    operation=st.sampled_from(OPERATIONS),
    dtypes=st.lists(st.sampled_from(FLOATS), max_size=4),
    device=st.sampled_from([*TABLES]),
    base=st.sampled_from([*NAMED]),
    rule=st.none() | st.sampled_from(CATEGORIES),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_decide_is_total(
    operation: str,
    dtypes: list[torch.dtype],
    device: str,
    base: str,
    rule: str | None,
    low: torch.dtype,
) -> None:
    """Law: every question has an answer, with a category, a reason and a row.

    The dtype is one that autocast casts to; the rule decides where there is one.
    """
    rules = () if rule is None else (Rule("op", operation, rule, "mine"),)
    found = decide(operation, dtypes, device, policy=Policy(rules, base), low=low)
    row = NAMED[base][device].get(operation)
    assert found.dtype in (None, low, torch.float32, *dtypes)
    assert found.dtype != torch.float64
    if rule:
        assert (found.category, found.reason) == (rule, "mine")
        assert found.row == f"op:{operation}={rule}"
    else:
        assert found.category == (row.category if row else "keep")
        assert found.reason == (
            row.reason if row else "no row: it runs as it is called"
        )
        assert found.row == f"{base} {device} table: {operation}={found.category}"


# What a pattern matches, and that a misspelt operation is refused


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
        ("module:net.0.attn=fp32", True),
        ("module:net.*=fp32", True),
        ("module:*attn=fp32", True),
        ("module:net.0=fp32", True),
        ("module:attn=fp32", False),
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


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("op:sofmax=fp32", "did you mean 'op:softmax=fp32'?"),
        ("op:aten::sofmax.int=low", "did you mean 'op:aten::softmax.int=low'?"),
        ("op:/zzz+/=low", "write aten's name of one that can be cast"),
        ("op:relu_=low", "write aten's name of one that can be cast"),
    ],
)
def test_rules_without_effect(rule: str, message: str) -> None:
    """Law: a rule that would change nothing is rejected, with what to write."""
    start = f"rule {rule!r} matches no operation; {message}"
    with pytest.raises(UserError, match=re.escape(start)):
        check_ops(TORCH + "op:mm=low" + rule)

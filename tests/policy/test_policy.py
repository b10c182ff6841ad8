"""Rules and policies: words and precedence; and what the one decider answers."""

import functools
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.policy import CATEGORIES, LEAN, TORCH, Policy, Rule, decide, rules
from halfstep.policy.decision import around, deciding_rule
from halfstep.policy.op_tables import FOLLOW, NAMED, TABLES

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


NO_RULE = (
    "rule {!r} is not KIND:PATTERN=CATEGORY; write for example "
    "'module:classifier=fp32' or 'type:LayerNorm=fp32'."
)
NO_PATTERN = (
    "rule 'module:{0}=fp32': pattern {0!r} must be a glob without ' + ', which "
    "separates rules; '*' matches every name."
)
NO_CATEGORY = (
    "rule 'op:mm=bf16': 'bf16' is not a category; choose one of low, fp32, promote, "
    "keep, banned."
)
NO_EXPRESSION = (
    "rule '{0}:{1}=fp32': '{1}' is not a regular expression: {2}. Fix it, or write a "
    "glob, without the slashes."
)
UNCLOSED = "missing ), unterminated subpattern at position 8"
NO_POLICY = "policy={!r} is not known; the named policies are 'torch' and 'lean'."
WRONG: list[tuple[Callable[[], object], str]] = [
    *(
        (functools.partial(Rule.parse, word), NO_RULE.format(word))
        for word in ("", "mm=fp32", "op:=fp32", "op:mm")
    ),
    *(
        (functools.partial(Rule, "module", text, "fp32"), NO_PATTERN.format(text))
        for text in ("", "a + b")
    ),
    *(
        (functools.partial(make, base), NO_POLICY.format(base))
        for base in ("", "Torch")
        for make in (Policy.parse, functools.partial(Policy, ()))
    ),
    (
        lambda: Rule.parse("layer:x=fp32"),
        "rule 'layer:x=fp32': kind 'layer' is not one of ('op', 'module', 'type').",
    ),
    (lambda: Rule.parse("op:mm=bf16"), NO_CATEGORY),
    (
        lambda: Policy.parse("op:mul=fp32"),
        NO_POLICY.format("op:mul=fp32")
        + " Rules follow one of them: 'lean + op:mul=fp32'.",
    ),
    (
        lambda: Rule.parse("module:/encoder.(0/=fp32"),
        NO_EXPRESSION.format("module", "/encoder.(0/", UNCLOSED),
    ),
    (
        lambda: Rule("op", "/a{99999999999}/", "fp32"),
        NO_EXPRESSION.format(
            "op", "/a{99999999999}/", "the repetition number is too large"
        ),
    ),
    (lambda: LEAN + "mm", NO_RULE.format("mm")),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_refusals(make: Callable[[], object], message: str) -> None:
    """Law: what `parse` could not read back cannot be made; what would be right."""
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == message


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

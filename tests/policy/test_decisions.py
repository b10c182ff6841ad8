"""The eager engine does what `decide` says: operation by operation, to the bit.

The oracle is torch without autocast, on operands that are cast by hand as `decide`
says. What torch then refuses, a region must refuse with the same words.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import op_arguments
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from halfstep.casting.autocast_mode import autocast
from halfstep.casting.dispatch_kernels import overload_of
from halfstep.policy import CATEGORIES, Decision, Policy, decide, op_tables

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASTABLE = (BF16, FP16, FP32)
LOWS = pytest.mark.parametrize("low", [BF16, FP16], ids=str)

UNCALLED = {
    "_mps_convolution": "it runs on MPS alone",
    "_transformer_encoder_layer_fwd": "its twenty operands are those of a layer",
    "_thnn_fused_gru_cell": "it runs on CUDA alone",
    "_thnn_fused_lstm_cell": "it runs on CUDA alone",
    "cudnn_convolution": "it runs on CUDA alone",
    "cudnn_convolution_transpose": "it runs on CUDA alone",
    "linalg_lstsq": "its last bits differ from call to call",
    "linalg_matrix_rank.atol_rtol_tensor": "its tensors are keywords",
    "mkldnn_rnn_layer": "it works on an LSTM's packed weights",
}
"""Rows that are not called here, and why."""


def row_of(operation: str) -> str:
    """Return an operation's row; all overloads of one called here are treated alike."""
    rows = {row for row in op_tables.TABLES["cpu"] if row.split(".")[0] == operation}
    assert len({op_tables.TABLES["cpu"][row].category for row in rows}) <= 1
    return min(rows, default=operation)


def calls() -> dict[str, Any]:
    """Return a call for each operation, by the name of its row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        accelerators, listed = op_arguments.arguments("cpu"), op_arguments.listed()
        more = op_arguments.cpu_arguments() | op_arguments.recurrent_arguments()
    made: dict[str, Any] = {
        row: (overload_of(row), arguments, {})
        for row, arguments in accelerators.items()
        if row in ROWS - UNCALLED.keys()
    }
    for kind, operation, arguments, words in listed:
        run = op_arguments.function(kind, operation)
        made[row_of(operation)] = run, tuple(arguments), words
    for row, arguments in more.items():
        if hasattr(torch.ops.aten, row.partition(".")[0]):  # else another torch has it
            made[row] = overload_of(row), arguments, {}
    return made


ROWS = {op for tables in (op_tables.TABLES, op_tables.LEAN) for op in tables["cpu"]}
CALLS = calls()
RULED = {name: call for name, call in CALLS.items() if name != "view_as_complex"}
"""What a rule may speak of: no views."""
ALL = "|".join(op.replace(".", r"\.") for op in sorted(RULED))
RULES = {word: Policy.parse(f"torch + op:/(?:{ALL})/={word}") for word in CATEGORIES}
"""Category -> a policy under which all of the calls run so."""


BASES = ("torch", "lean")
UNCHECKED = {"_native_multi_head_attention"}
"""torch reads a bias of another format as if it were of theirs, beyond its end: what
comes out depends on what lies there."""
FLOATS = st.sampled_from([FP32, BF16, FP16, FP64])
POLICIES = RULES | {base: Policy.parse(f"{base} + op:lgamma=fp32") for base in BASES}
"""Those of a table have a rule, under which torch's table runs in our context, too."""


def eligible(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in CASTABLE


def kept(name: str, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return which arguments stay fp32 beside 16-bit data."""
    indices = op_tables.fp32_arguments(name, "cpu")
    weight, *bias = [arguments[i] for i in indices[:2] if i < len(arguments)] or [None]
    is_fp32 = weight is not None and weight.dtype == FP32
    is_fp32 = is_fp32 and all(b is None or b.dtype == FP32 for b in bias)
    return indices if is_fp32 else indices[2:]


def by_hand(name: str, call: Any, found: Decision, low: torch.dtype) -> Any:
    """Run an operation without autocast, on operands cast as was decided."""
    run, arguments, words = call
    if found.category == op_tables.FP32_RESULT:
        if not eligible(arguments[0]):
            return run(*arguments, **words)
        if name in op_arguments.WITH_DTYPE:
            other, more = op_arguments.WITH_DTYPE[name]
            run, arguments = overload_of(other), (*arguments, *more)
        return run(*arguments, **words, dtype=FP32)
    cast = _pytree.tree_map(
        lambda v: v.to(found.dtype) if found.dtype and eligible(v) else v, arguments
    )
    stay = kept(name, arguments) if found.dtype == low else ()
    cast = [arguments[i] if i in stay else v for i, v in enumerate(cast)]
    return run(*cast, **words)


def outcome(run: Callable[[], Any]) -> Any:
    """Return what comes out, or the first line of torch's refusal."""
    torch.manual_seed(1)
    try:
        return run()
    except (RuntimeError, NotImplementedError, IndexError) as error:
        return str(error).splitlines()[0]


def dtypes_of(call: Any) -> list[torch.dtype]:
    leaves = _pytree.tree_leaves(call[1:])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [t.dtype for t in tensors if t.is_floating_point()]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return bool(found == expected)
    try:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


def agree(name: str, call: Any, policy: Policy, low: torch.dtype) -> bool:
    """Say whether the engine's outcome is that of what `decide` says."""
    run, arguments, words = call
    kind = name if name in ROWS else row_of(name)
    found = decide(kind, dtypes_of(call), "cpu", policy=policy, low=low)
    with autocast("cpu", low, policy=policy), warnings.catch_warnings():
        seen = outcome(lambda: run(*arguments, **words))
    if found.category == "banned":
        banned = f" is banned by the rule '{policy.rules[0]}'. Use another operation "
        return str(seen).endswith(f"{banned}there, or take the rule out of the policy.")
    if policy.base == "torch" and "at::autocast::prioritize" in str(seen)[:99]:
        # torch refuses to promote the other 16-bit format.
        return (found.category, found.dtype) == (op_tables.PROMOTE, FP32)
    return same(seen, outcome(lambda: by_hand(kind, call, found, low)))


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    """Let a region do without rules that it does not need, and call what is old."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "policy rule")
        warnings.filterwarnings("ignore", ".* deprecated")
        yield


def test_every_row_is_called() -> None:
    """Law: each row of both tables is tried, or it is said why not."""
    assert ROWS - CALLS.keys() == UNCALLED.keys()


@pytest.mark.parametrize("category", CATEGORIES)
def test_operations_under_a_rule(category: str) -> None:
    """Law: under a rule every operation does what the rule's category says."""
    wrong = [
        name
        for number, (name, call) in enumerate(RULED.items())
        if not agree(name, call, RULES[category], (BF16, FP16)[number % 2])
    ]
    assert wrong == []


@LOWS
@pytest.mark.parametrize("base", BASES)
def test_operations_under_a_table(base: str, low: torch.dtype) -> None:
    """Law: without a rule every operation with a row does what its row says."""
    policy = POLICIES[base]
    rows = op_tables.NAMED[base]["cpu"].keys() & CALLS.keys()
    calls = {name: CALLS[name] for name in sorted(rows)}
    wrong = [n for n, call in calls.items() if not agree(n, call, policy, low)]
    assert wrong == []


@settings(max_examples=400)
@given(data=st.data())
def test_any_mix_of_formats(data: st.DataObject) -> None:
    """Law: whatever the operands' formats, engine and `decide` agree."""
    word = data.draw(st.sampled_from(sorted(POLICIES)))
    policy, names = POLICIES[word], RULED.keys() - UNCHECKED
    if word == "torch":  # without a row torch may cast inside
        names &= op_tables.TABLES["cpu"].keys()
    name = data.draw(st.sampled_from(sorted(names)))
    low = data.draw(st.sampled_from([BF16, FP16]))
    run, arguments, words = CALLS[name]

    def other(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(data.draw(FLOATS)) if floating else value

    mixed = _pytree.tree_map(other, arguments)
    assert agree(name, (run, mixed, words), policy, low)


# What no rule touches


@LOWS
@pytest.mark.parametrize("category", CATEGORIES)
def test_writing_variants_run_as_called(category: str, low: torch.dtype) -> None:
    """Law: in-place and out= variants take and give what they would elsewhere."""
    a, b, out = torch.randn(4, 4), torch.randn(4, 4), torch.empty(4, 4)
    programs: dict[str, Callable[[], Any]] = {
        "mm out": lambda: torch.mm(a, b, out=out),
        "mm out low": lambda: torch.mm(a.to(low), b.to(low), out=out.to(low)),
        "mm out mixed": lambda: torch.mm(a, b.to(low), out=out),
        "addmm_": lambda: a.clone().addmm_(a, b),
        "addmm_ low": lambda: a.to(low).addmm_(a.to(low), b.to(low)),
        "addmm_ mixed": lambda: a.clone().addmm_(a.to(low), b.to(low)),
        "softmax out": lambda: torch.softmax(a.to(low), 0, out=out.to(low)),
        "exp_": lambda: a.to(low).exp_(),
        "exp out": lambda: torch.exp(a.to(low), out=out),
        "cumsum_": lambda: a.to(low).cumsum_(0),
        "sum out": lambda: torch.sum(a.to(low), 0, out=out[0].to(low)),
        "cat out": lambda: torch.cat([a, b.to(low)], out=torch.empty(8, 4)),
        "index_put_": lambda: a.clone().index_put_([torch.tensor([0])], b[:1]),
    }
    for name, program in programs.items():
        with autocast("cpu", low, policy=RULES[category]):
            seen = outcome(program)
        assert same(seen, outcome(program)), name


def test_no_operands_at_all() -> None:
    """Law: integers, bools and complex numbers are left alone by every category."""
    whole, phases = torch.arange(4), torch.ones(4, dtype=torch.complex64)
    for category in set(CATEGORIES) - {"banned"}:
        with autocast("cpu", BF16, policy=RULES[category]):
            assert torch.sum(whole).dtype == torch.int64
            assert torch.cat([whole, whole]).dtype == torch.int64
            assert torch.dot(phases, phases).dtype == torch.complex64

"""The eager engine does what `decide` says: operation by operation, to the bit.

The oracle is torch without autocast, on operands that are cast by hand as `decide`
says. What torch then refuses, a region must refuse with the same words.
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from halfstep.casting.autocast_mode import autocast
from halfstep.casting.dispatch_kernels import overload_of
from halfstep.policy import CATEGORIES, Policy, decide, op_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.policy import Decision

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASTABLE = (BF16, FP16, FP32)
LOWS = pytest.mark.parametrize("low", [BF16, FP16], ids=str)

TORCHS = runpy.run_path(str(Path(__file__).with_name("test_op_tables_results.py")))
"""Where torch's own lists are read, and arguments for what they leave out."""


def recurrent(gates: int) -> dict[str, tuple[Any, ...]]:
    """Return arguments of a recurrent layer, whole and packed, and of its cell."""
    x, hidden = torch.randn(3, 2, 4), torch.randn(1, 2, 4)
    cell = [torch.randn(gates * 4, 4), torch.randn(gates * 4, 4)]
    cell += [torch.randn(gates * 4), torch.randn(gates * 4)]
    rest = (cell, True, 1, 0.0, True, False)
    packed = x[:2].reshape(4, 4), torch.tensor([2, 2])
    return {
        "input": (x, hidden, *rest, False),
        "data": (*packed, hidden, *rest),
        "cell": (x[0], hidden[0], *cell),
    }


def with_memory(arguments: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    """Return a layer's arguments with the pair of states that an LSTM has."""
    state = arguments[place]
    return (*arguments[:place], [state, state], *arguments[place + 1 :])


def more_arguments() -> dict[str, tuple[Any, ...]]:
    """Return what to call lean's rows with that torch's table has not."""
    x, y, v = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)
    p, w = torch.rand(6, 6) / 2 + 0.25, torch.randn(4, 6, 6)
    line, picture = torch.randn(2, 3, 4), torch.randn(2, 3, 4, 4)
    volume = torch.randn(1, 2, 3, 3, 3)
    gru, rnn, lstm = recurrent(3), recurrent(1), recurrent(4)
    weight, ones = torch.randn(2, 3, 2, 2), ([1, 1], [0, 0], [1, 1])
    index = torch.tensor([[0, 1, 2]])
    one = "cosh expm1 reciprocal rsqrt sinh log log10 log2 log1p acos asin erfinv tan"
    return dict.fromkeys([*one.split(), "pdist", "softplus", "nuclear_norm"], (p,)) | {
        "_convolution.deprecated": (
            *(picture, weight, None, *ones, False, [0, 0], 1),
            *(False, False, False),
        ),
        "_convolution": (
            *(picture, weight, None, *ones, False, [0, 0], 1),
            *(False, False, False, False),
        ),
        "convolution": (picture, weight, None, *ones, False, [0, 0], 1),
        "_scaled_dot_product_flash_attention": (picture, picture, picture),
        "_upsample_bicubic2d_aa": (picture, [3, 3], False),
        "_upsample_bilinear2d_aa": (picture, [3, 3], False),
        "_upsample_nearest_exact1d": (line, [5]),
        "_upsample_nearest_exact2d": (picture, [5, 5]),
        "_upsample_nearest_exact3d": (volume, [5, 5, 5]),
        "upsample_nearest1d": (line, [5]),
        "upsample_nearest2d": (picture, [5, 5]),
        "upsample_nearest3d": (volume, [5, 5, 5]),
        "upsample_linear1d": (line, [5], False),
        "upsample_bilinear2d": (picture, [5, 5], False),
        "upsample_bicubic2d": (picture, [5, 5], False),
        "upsample_trilinear3d": (volume, [5, 5, 5], False),
        "addcdiv": (x, y, p),
        "addcmul": (x, y, p),
        "addmv": (v, x, v),
        "addr": (x, v, v),
        "atan2": (x, y),
        "bilinear": (x, y, w, v[:4]),
        "chain_matmul": ([x, y, p],),
        "cosine_similarity": (x, y),
        "cross": (x[:, :3], y[:, :3]),
        "cumprod": (x, 0),
        "cumsum": (x, 0),
        "dist": (x, y),
        "dot": (v, v),
        "vdot": (v, v),
        "einsum": ("ij,jk->ik", [x, y]),
        "frobenius_norm.dim": (x, [0]),
        "group_norm": (line, 3, v[:3], v[:3]),
        "lstm.data": with_memory(lstm["data"], 2),
        "lstm.input": with_memory(lstm["input"], 1),
        "gru.data": gru["data"],
        "gru.input": gru["input"],
        "gru_cell": gru["cell"],
        "rnn_relu.data": rnn["data"],
        "rnn_relu.input": rnn["input"],
        "rnn_relu_cell": rnn["cell"],
        "rnn_tanh.data": rnn["data"],
        "rnn_tanh.input": rnn["input"],
        "rnn_tanh_cell": rnn["cell"],
        "lstm_cell": (lstm["cell"][0], [lstm["cell"][1]] * 2, *lstm["cell"][2:]),
        "index_put": (x, [torch.tensor([0, 2])], y[:2]),
        "linalg_matrix_norm": (x, 2),
        "linalg_matrix_norm.str_ord": (x, "nuc"),
        "linalg_multi_dot": ([x, y, p],),
        "linalg_vector_norm": (x,),
        "log_softmax.int": (x, 0),
        "logsumexp": (x, [0]),
        "native_layer_norm": (x, [6], v, v, 1e-5),
        "norm.Scalar": (x,),
        "norm.ScalarOpt_dim": (x, 2, [0]),
        "nuclear_norm.dim": (x, [0, 1]),
        "pow.Scalar": (2, x),
        "pow.Tensor_Scalar": (p, 2.5),
        "pow.Tensor_Tensor": (p, y),
        "renorm": (x, 2, 0, 1.0),
        "scatter_add": (x, 0, index, y),
        "sum.dim_IntList": (x, [0]),
        "tensordot": (x, y, [1], [0]),
    }


UNCALLED = {
    "_mps_convolution": "it runs on MPS alone",
    "_thnn_fused_gru_cell": "it runs on CUDA alone",
    "_thnn_fused_lstm_cell": "it runs on CUDA alone",
    "cudnn_convolution": "it runs on CUDA alone",
    "cudnn_convolution_transpose": "it runs on CUDA alone",
    "linalg_lstsq": "its last bits differ from call to call",
    "linalg_matrix_rank.atol_rtol_tensor": "its tensors are keywords",
    "mkldnn_rnn_layer": "it works on an LSTM's packed weights",
}
"""Rows that are not called here, and why."""


def calls() -> dict[str, Any]:
    """Return a call for each operation, by the name of its row."""
    made: dict[str, Any] = {}
    for kind, operation, arguments, words in TORCHS["CPU_CASES"]:
        run = TORCHS["function"](kind, operation)
        made[TORCHS["row_of"](operation)] = run, tuple(arguments), words
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        more = more_arguments()
    for row, arguments in (TORCHS["MORE"] | more).items():
        if not hasattr(torch.ops.aten, row.partition(".")[0]):
            continue  # another torch has it
        made[row] = overload_of(row), arguments, {}
    return made


CALLS = calls()
ROWS = {op for tables in (op_tables.TABLES, op_tables.LEAN) for op in tables["cpu"]}
RULED = {name: call for name, call in CALLS.items() if name != "view_as_complex"}
"""What a rule may speak of: no views."""
ALL = "|".join(op.replace(".", r"\.") for op in sorted(RULED))
RULES = {word: Policy.parse(f"torch + op:/(?:{ALL})/={word}") for word in CATEGORIES}
"""Category -> a policy under which all of the calls run so."""


def eligible(value: object) -> bool:
    """Say whether autocast sees a value."""
    return isinstance(value, Tensor) and value.dtype in CASTABLE


def by_hand(name: str, call: Any, found: Decision) -> Any:
    """Run an operation without autocast, on operands cast as was decided."""
    run, arguments, words = call
    if found.category == op_tables.FP32_RESULT:
        if not eligible(arguments[0]):
            return run(*arguments, **words)
        if name == "norm.Scalar":
            run, arguments = torch.ops.aten.norm.ScalarOpt_dtype, (*arguments, 2)
        if name == "norm.ScalarOpt_dim":
            run, arguments = (
                torch.ops.aten.norm.ScalarOpt_dim_dtype,
                (*arguments, False),
            )
        return run(*arguments, **words, dtype=FP32)
    cast = _pytree.tree_map(
        lambda v: v.to(found.dtype) if found.dtype and eligible(v) else v, arguments
    )
    return run(*cast, **words)


def outcome(run: Callable[[], Any]) -> Any:
    """Return what comes out, or the first line of torch's refusal."""
    torch.manual_seed(1)
    try:
        return run()
    except (RuntimeError, NotImplementedError, IndexError) as error:
        return str(error).splitlines()[0]


def dtypes_of(call: Any) -> list[torch.dtype]:
    """Return the formats of an operation's floating operands, in order."""
    leaves = _pytree.tree_leaves(call[1:])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [t.dtype for t in tensors if t.is_floating_point()]


def same(found: Any, expected: Any) -> bool:
    """Say whether two outcomes are the same, tensors in dtype and every bit."""
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
    kind = name if name in ROWS else TORCHS["row_of"](name)
    found = decide(kind, dtypes_of(call), "cpu", policy=policy, low=low)
    with autocast("cpu", low, policy=policy), warnings.catch_warnings():
        seen = outcome(lambda: run(*arguments, **words))
    if found.category == "banned":
        banned = f" is banned by the rule '{policy.rules[0]}'. Use another operation "
        return str(seen).endswith(f"{banned}there, or take the rule out of the policy.")
    return same(seen, outcome(lambda: by_hand(kind, call, found)))


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


@LOWS
@pytest.mark.parametrize("category", CATEGORIES)
def test_operations_under_a_rule(category: str, low: torch.dtype) -> None:
    """Law: under a rule every operation does what the rule's category says."""
    wrong = [
        name
        for name, call in RULED.items()
        if not agree(name, call, RULES[category], low)
    ]
    assert wrong == []


@LOWS
@pytest.mark.parametrize("base", ["torch", "lean"])
def test_operations_under_a_table(base: str, low: torch.dtype) -> None:
    """Law: without a rule every operation with a row does what its row says."""
    policy = Policy.parse(f"{base} + op:lgamma=fp32")
    rows = op_tables.NAMED[base]["cpu"].keys() & CALLS.keys()
    calls = {name: CALLS[name] for name in sorted(rows)}
    if base == "torch":
        # It refuses to promote the other 16-bit format; its list holds bf16.
        for name in ("cat", "stack"):
            run, (tensors,), words = CALLS[name]
            calls[name] = run, ([t.to(low) for t in tensors],), words
    wrong = [n for n, call in calls.items() if not agree(n, call, policy, low)]
    assert wrong == []


UNCHECKED = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
"""torch reads a bias of another format as if it were of theirs, beyond its end: what
comes out depends on what lies there."""
FLOATS = st.sampled_from([FP32, BF16, FP16, FP64])
POLICIES = RULES | {"lean": Policy.parse("lean")}


@settings(max_examples=400)
@given(data=st.data())
def test_any_mix_of_formats(data: st.DataObject) -> None:
    """Law: whatever the operands' formats, engine and `decide` agree."""
    name = data.draw(st.sampled_from(sorted(RULED.keys() - UNCHECKED)))
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    low = data.draw(st.sampled_from([BF16, FP16]))
    run, arguments, words = CALLS[name]

    def other(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(data.draw(FLOATS)) if floating else value

    mixed = _pytree.tree_map(other, arguments)
    assert agree(name, (run, mixed, words), policy, low)


def test_the_comparison_can_fail() -> None:
    """Law: another dtype, another category and another table are all seen."""
    for name in ("mm", "softmax.int", "sum"):
        call = CALLS[name]
        low = decide(name, (FP32,), "cpu", policy=RULES["low"])
        wide = decide(name, (FP32,), "cpu", policy=RULES["fp32"])
        assert not same(by_hand(name, call, low), by_hand(name, call, wide))


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

"""torch's table for the CPU against torch: what operations give.

The oracle is torch itself. Each operation runs under `torch.autocast`, and once more
without it on operands cast as `decide` says: both must give the same.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.policy import decide, op_tables
from halfstep.policy.op_tables import BANNED, FP32_RESULT, PROMOTE, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Kind of list, operation, arguments, keywords."""


def torch_lists() -> Any:
    """Return torch's own lists of operations, each with arguments to call it with."""
    # They ask torch's test library, which needs much else, for one flag.
    stub = ModuleType("torch.testing._internal.common_utils")
    vars(stub).update(TEST_WITH_ROCM=False, TestCase=object)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stub.__name__, stub)
        from torch.testing._internal import autocast_test_lists as lists
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds: Any = lists
        return kinds.AutocastCPUTestLists("cpu")


def cases(lists: Any) -> list[Case]:
    """Return the lists as one, promotions in their first form."""
    return [
        (kind, entry[0], entry[1], entry[2] if isinstance(entry[-1], dict) else {})
        for kind, entries in vars(lists).items()
        for entry in entries
    ]


def function(kind: str, operation: str) -> Any:
    """Return the function or method that torch's list means."""
    if kind.startswith("methods"):
        return getattr(Tensor, operation)
    c: Any = torch._C
    places = (torch, c._nn, c._linalg)
    return next(getattr(at, operation) for at in places if hasattr(at, operation))


def row_of(operation: str) -> str:
    """Return an operation's row; all overloads of one called here are treated alike."""
    rows = {row for row in TABLES["cpu"] if row.split(".")[0] == operation}
    assert len({TABLES["cpu"][row].category for row in rows}) <= 1
    return min(rows, default=operation)


def tensors(value: Any) -> Iterator[Tensor]:
    """Find floating tensors in nested tuples and lists."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating tensors by hand, float64 excepted."""
    if isinstance(value, Tensor):
        seen = value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if dtype and seen else value
    if isinstance(value, tuple | list):
        return type(value)(cast(item, dtype) for item in value)
    return value


def by_decision(
    operation: str, call: Any, arguments: Any, words: Any, low: torch.dtype
) -> Any:
    """Run an operation on operands cast as `decide` says."""
    dtypes = [tensor.dtype for tensor in tensors(arguments)]
    found = decide(row_of(operation), dtypes, "cpu", low=low)
    assert found.category not in (FP32_RESULT, BANNED)
    return call(*cast(arguments, found.dtype), **words)


def same(theirs: Any, ours: Any) -> None:
    """Compare nested results in dtype and every bit."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


LOWS = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
CPU_CASES = cases(torch_lists())


@LOWS
@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_torchs_own_list_on_cpu(case: Case, low: torch.dtype) -> None:
    """Law: casting as `decide` says gives what torch.autocast gives, to the bit."""
    kind, operation, arguments, words = case
    if "need_autocast_promote" in kind:
        # The list's 16-bit operand is bf16; it must be the region's own format.
        arguments = ((arguments[0][0].to(low), arguments[0][1]),)
    call = function(kind, operation)
    with torch.autocast("cpu", low):
        theirs = call(*arguments, **words)
    same(theirs, by_decision(operation, call, arguments, words, low))


def more_arguments() -> dict[str, tuple[Any, ...]]:
    """Return what to call rows with that torch's list leaves out, and some without."""
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    spd = x @ x.T + 6 * torch.eye(6)
    a, b, m = x.bfloat16(), y.bfloat16(), spd.bfloat16()
    picture, volume = torch.randn(2, 3, 4, 4), torch.randn(1, 2, 6, 6, 6)
    p16, v16, grid = picture.bfloat16(), volume.bfloat16(), torch.rand(2, 5, 5, 2)
    within = torch.arange(216).reshape(6, 6, 6).repeat(1, 2, 1, 1, 1)
    labels, ones = torch.arange(6), torch.ones(6, dtype=torch.long)
    kernel, vector = torch.randn(1, 3, 3, 3), torch.randn(6)
    one_matrix = (
        "cholesky cholesky_inverse geqrf inverse pinverse prod qr svd trace "
        "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh "
        "linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex "
        "linalg_matrix_sqrth linalg_qr linalg_svd linalg_svdvals _lu_with_info "
        "exp gelu sum"
    )
    fft = [name for name in TABLES["cpu"] if name.startswith("fft_")]
    return dict.fromkeys([*one_matrix.split(), *fft], (m,)) | {
        "adaptive_avg_pool3d": (v16, [2, 2, 2]),
        "adaptive_max_pool3d": (v16, [2, 2, 2]),
        "cdist": (a, b),
        "cholesky_solve": (a, m),
        "conv1d.padding": (picture[0], torch.randn(1, 4, 3), None, [1], "same"),
        "conv2d.padding": (picture, kernel, None, [1, 1], "same"),
        "conv3d.padding": (volume, torch.randn(1, 2, 3, 3, 3), None, [1] * 3, "valid"),
        "cross_entropy_loss": (a, labels),
        "ctc_loss.IntList": (a[:, None].log_softmax(2), labels[None, 1:3], [6], [2]),
        "ctc_loss.Tensor": (
            a[:, None].log_softmax(2),
            labels[None, 1:3],
            *ones[:2, None],
        ),
        "embedding": (x, labels),
        "fake_quantize_per_tensor_affine": (a, 0.5, 0, -8, 7),
        "_grid_sampler_2d_cpu_fallback": (p16, grid.bfloat16(), 0, 0, False),
        "fractional_max_pool2d": (p16, [2, 2], [2, 2], torch.rand(2, 3, 2).bfloat16()),
        "fractional_max_pool3d": (
            v16,
            [2] * 3,
            [2] * 3,
            torch.rand(1, 2, 3).bfloat16(),
        ),
        "grid_sampler": (p16, grid.bfloat16(), 0, 0, False),
        "grid_sampler_2d": (p16, grid.bfloat16(), 0, 0, False),
        "grid_sampler_3d": (v16, torch.rand(1, 2, 2, 2, 3).bfloat16(), 0, 0, False),
        "index_copy": (x, 0, ones[:1], b[:1]),
        "kl_div": (a, b.abs()),
        "layer_norm": (a, [6]),
        "linalg_cond.p_str": (m, "fro"),
        "linalg_householder_product": (m, vector.bfloat16()),
        "linalg_matrix_rank": (m, 0.1),
        "linalg_matrix_rank.atol_rtol_float": (m,),
        "linalg_matrix_rank.tol_tensor": (m, vector[0].bfloat16()),
        "linalg_solve": (m, a),
        "linalg_tensorinv": (m.reshape(2, 3, 6),),
        "linalg_tensorsolve": (m, vector.bfloat16()),
        "linalg_vecdot": (x, y),
        "lu_solve": (a, m, torch.arange(1, 7, dtype=torch.int32)),
        "max_pool3d": (v16, [2, 2, 2]),
        "max_unpool2d": (
            p16,
            torch.arange(16).reshape(4, 4).repeat(2, 3, 1, 1),
            [8, 8],
        ),
        "max_unpool3d": (v16, within, [6, 6, 6], [1, 1, 1], [0, 0, 0]),
        "multilabel_margin_loss_forward": (a[0], labels, 1),
        "mv": (x, vector),
        "nanquantile": (m, torch.tensor([0.5], dtype=torch.bfloat16)),
        "nanquantile.scalar": (m, 0.5),
        "orgqr": (m, vector.bfloat16()),
        "ormqr": (m, vector.bfloat16(), a),
        "polar": (a, b),
        "prod.dim_int": (m, 0),
        "quantile": (m, torch.tensor([0.5], dtype=torch.bfloat16)),
        "quantile.scalar": (m, 0.5),
        "reflection_pad2d": (p16, [1, 1, 1, 1]),
        "replication_pad1d": (a, [1, 1]),
        "replication_pad2d": (p16, [1, 1, 1, 1]),
        "replication_pad3d": (v16, [1] * 6),
        "rms_norm": (a, [6]),
        "scaled_dot_product_attention": (picture, picture, picture),
        "softmax.int": (a, 0),
        "stft": (a[0], 4, None, None, None, False, True, True),
        "stft.center": (a[0], 4, *[None] * 3, True, "reflect", False, True, True),
        "triangular_solve": (a, m),
        "view_as_complex": (a.reshape(18, 2),),
    }


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    MORE = more_arguments()


UNCALLED = {
    "_convolution.deprecated": "python reaches it through conv2d alone",
    "linalg_lstsq": "its last bits differ from call to call",
    "linalg_matrix_rank.atol_rtol_tensor": "its tensors are keywords",
    "mkldnn_rnn_layer": "it works on an LSTM's packed weights",
}
"""Rows that are not called here, and why."""


def test_every_row_is_called() -> None:
    """Law: each row of the CPU's table is tried, or it is said why not."""
    listed = {row_of(case[1]) for case in CPU_CASES}
    assert TABLES["cpu"].keys() - listed - MORE.keys() == UNCALLED.keys()


@LOWS
@pytest.mark.parametrize("row", [row for row in MORE if op_tables._exists(row)])
@pytest.mark.filterwarnings("ignore:.*(deprecated|A window was not provided)")
def test_more_rows_on_cpu(row: str, low: torch.dtype) -> None:
    """Law: as above, for rows that torch's list leaves out and operations without."""
    packet, _, overload = row.partition(".")
    call = getattr(getattr(torch.ops.aten, packet), overload or "default")
    arguments = tuple(
        item.to(low)
        if isinstance(item, Tensor) and item.dtype == torch.bfloat16
        else item
        for item in MORE[row]
    )
    with torch.autocast("cpu", low):
        theirs = call(*arguments)
    same(theirs, by_decision(row, call, arguments, {}, low))


OPERATIONS: dict[str, Any] = {
    "mm": torch.mm,
    "linear": nn.functional.linear,
    "mse_loss": torch._C._nn.mse_loss,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "add": torch.add,
    "index_copy": lambda a, b: torch.index_copy(a, 0, torch.arange(3), b),
    "atan2": torch.atan2,
}
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(
    operation=st.sampled_from([*OPERATIONS]),
    dtypes=st.tuples(FLOATS, FLOATS),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_any_mix_of_dtypes_on_cpu(
    operation: str, dtypes: tuple[torch.dtype, ...], low: torch.dtype
) -> None:
    """Law: for every pair of dtypes autocast's result is that of `decide`'s casts.

    Where torch refuses the pair after its own casts, so it does after ours; except
    that promoting the other 16-bit format, which torch refuses, is decided as fp32.
    """
    operands = tuple(torch.randn(3, 3).to(dtype) for dtype in dtypes)
    call = OPERATIONS[operation]
    try:
        with torch.autocast("cpu", low):
            theirs = call(*operands)
    except RuntimeError as error:
        if "prioritize" in str(error):
            assert TABLES["cpu"][operation].category == PROMOTE
            assert decide(operation, dtypes, "cpu", low=low).dtype == torch.float32
            assert {torch.bfloat16, torch.float16} - {low} <= set(dtypes)
            return
        with pytest.raises(type(error)):
            by_decision(operation, call, operands, {}, low)
    else:
        same(theirs, by_decision(operation, call, operands, {}, low))

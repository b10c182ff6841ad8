"""The tables' names, reasons and composition, against torch's dispatcher."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from versions import only_pinned

from halfstep.policy import op_tables
from halfstep.policy.op_tables import (
    BANNED,
    FOLLOW,
    FP32,
    FP32_IN_FP16,
    FP32_RESULT,
    LEAN,
    LOW,
    NAMED,
    PROMOTE,
    TABLES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
}
DEVICES = pytest.mark.parametrize("device", KEYS)


# torch's


REGISTERED = """
import json, torch
keys = {keys}
names = torch._C._dispatch_get_registrations_for_dispatch_key
print(json.dumps({{device: names(key) for device, key in keys.items()}}))
"""


@cache
def registrations() -> dict[str, list[str]]:
    """Return what torch registers for casting, by device.

    A fresh interpreter is asked: in this one other tests may have put kernels there.
    """
    program = REGISTERED.format(keys=KEYS)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def registered(device: str) -> set[str]:
    """Return the operations of torch's own that it registers for casting.

    Without those on named dimensions: torch 2.9 casts them, later versions do not.
    """
    found = [name for name in registrations()[device] if name.startswith("aten::")]
    found = [name.removeprefix("aten::") for name in found]
    # Only builds with cuDNN register it; it re-packs weights, and has no row.
    found = [name for name in found if "imname" not in name and ".names_" not in name]
    return {*found} - {"_cudnn_rnn"}


def moved(device: str, names: AbstractSet[str], rows: Iterable[str]) -> str:
    """Return what torch gained and lost against the rows, "" where they agree."""
    gained, lost = sorted(names - set(rows)), sorted(set(rows).difference(names))
    if not gained and not lost:
        return ""
    return f"{device}: torch gained {gained} and lost {lost}; mend optable.TABLES"


@DEVICES
def test_names_are_those_registered(device: str) -> None:
    """Law: the table holds exactly the operations that torch registers for casting."""
    found = moved(device, registered(device), TABLES[device])
    assert not found, found


def test_operations_that_torch_lacks_have_no_row() -> None:
    """Law: a row needs an operation of this torch, overload included.

    Twin: without its overload the operation is there.
    """
    names = "mm no_such_operation mm.no_such_overload sum.dim_IntList"
    rows = op_tables._rows("a source", (FP32, "a reason", names))
    assert [*rows] == ["mm", "sum.dim_IntList"]


def test_operations_that_torch_does_not_cast_have_no_row() -> None:
    """Law: torch's table has what torch casts: matrix products, not views."""
    rows = op_tables._rows("a source", (LOW, "a reason", "mm view"))
    assert len(rows) == 2
    for device in KEYS:
        assert [*op_tables._registered(device, rows)] == ["mm"]


def test_what_moved_is_named() -> None:
    """Law: the check above can fail, and says what came and what went."""
    assert not moved("cpu", {"mm"}, ["mm"])
    assert moved("cpu", {"mm", "new"}, ["mm", "old"]) == (
        "cpu: torch gained ['new'] and lost ['old']; mend optable.TABLES"
    )


@DEVICES
def test_what_has_no_row(device: str) -> None:
    """Law: operations that torch runs as called have neither kernel nor row."""
    for operation in ("relu", "gelu", "embedding", "add.Tensor"):
        assert operation not in TABLES[device]
        assert operation not in registered(device), operation


@only_pinned("its macros were counted")
@pytest.mark.parametrize(
    ("device", "counts"),
    [
        ("cpu", {LOW: 24, FP32: 100, PROMOTE: 3}),
        ("cuda", {LOW: 35, FP32: 59, FP32_RESULT: 13, PROMOTE: 11, BANNED: 1}),
        # CUDA's without cuDNN's two.
        ("xpu", {LOW: 33, FP32: 59, FP32_RESULT: 13, PROMOTE: 11, BANNED: 1}),
        # 35 of CUDA without 10, and one of its own; 59 without 13, and batch_norm,
        # conv_transpose3d and 11 reductions; without vdot.
        ("mps", {LOW: 26, FP32: 59, PROMOTE: 10}),
    ],
)
def test_counts(device: str, counts: dict[str, int]) -> None:
    """Law: each treatment has as many operations as torch's macros list."""
    found = [row.category for row in TABLES[device].values()]
    assert {category: found.count(category) for category in found} == counts


@pytest.mark.parametrize("base", NAMED)
@DEVICES
def test_rows_say_why_and_where(device: str, base: str) -> None:
    """Law: a reason is a phrase that fits a line, the source a file or lean itself."""
    files = {f"aten/src/ATen/autocast_mode.{suffix}" for suffix in ("h", "cpp")}
    for operation, row in NAMED[base][device].items():
        assert 20 < len(row.reason) <= 80, operation
        assert not row.reason.endswith("."), operation
        assert row.source in (files if base == "torch" else {"halfstep lean"})


def test_reasons_differ_by_kind() -> None:
    """Law: the reason speaks of the operation, not of its treatment alone."""
    reasons = {name: row.reason for name, row in TABLES["cpu"].items()}
    kinds = ["mse_loss", "linalg_qr", "fft_fft", "quantile", "polar", "max_pool3d"]
    assert len({reasons[kind] for kind in kinds}) == len(kinds)
    assert reasons["mse_loss"] == reasons["l1_loss"]
    assert "16-bit kernel" in reasons["linalg_qr"]
    assert "probabilities" in TABLES["cuda"]["binary_cross_entropy"].reason


def test_no_operation_stands_twice() -> None:
    """Law: no row hides another: rows are as many as names were written."""
    shared = (*op_tables._ACCELERATORS, *op_tables._CUDA_AND_XPU, op_tables._BAN)
    groups = {
        "cpu": op_tables._CPU,
        "cuda": (*shared, *op_tables._CUDA),
        "xpu": shared,
        "mps": (*op_tables._ACCELERATORS, *op_tables._MPS),
    }
    for device, written in groups.items():
        names = [name for *_, names in written for name in names.split()]
        assert len(names) == len(set(names))
        assert {*names} >= TABLES[device].keys()


# Lean

CPU_ALONE = {
    *("lstm.input", "lstm.data"),
    *("gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data"),
    *("rnn_relu.input", "rnn_relu.data"),
}
FOLLOWERS = {
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softmax.int"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d"),
}
RESULTS = {
    *("prod", "prod.dim_int", "log_softmax.int", "cumprod", "cumsum", "sum"),
    *("sum.dim_IntList", "linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim"),
}
PROMOTED = {
    *("stack", "cat", "index_copy", "addcdiv", "addcmul", "atan2", "bilinear"),
    *("cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"),
    *("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
}
AS_CALLED = {
    *("adaptive_avg_pool3d", "adaptive_max_pool3d", "fractional_max_pool2d"),
    *("fractional_max_pool3d", "max_pool3d", "max_unpool2d", "max_unpool3d"),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d"),
    *("replication_pad2d", "replication_pad3d", "fake_quantize_per_tensor_affine"),
}


def those(rows: dict[str, op_tables.Row], category: str) -> set[str]:
    """Return the operations of a category."""
    return {name for name, row in rows.items() if row.category == category}


def test_lean_is_the_same_everywhere() -> None:
    """Law: one table for all, but for recurrent layers on CPU and one gap of MPS."""
    assert LEAN["cuda"] == LEAN["xpu"]
    assert LEAN["cpu"].keys() - LEAN["cuda"] == CPU_ALONE
    assert LEAN["cpu"].items() >= LEAN["cuda"].items()
    gap = "conv_transpose3d.input"
    assert LEAN["cuda"] | {gap: LEAN["mps"][gap]} == LEAN["mps"]
    assert (LEAN["cuda"][gap].category, LEAN["mps"][gap].category) == (LOW, FP32)


def test_lean_by_category() -> None:
    """Law: lean is what its description says, treatment by treatment."""
    lean, cpu, cuda = LEAN["cpu"], TABLES["cpu"], TABLES["cuda"]
    assert those(lean, LOW) == CPU_ALONE.union(
        *(those(TABLES[device], LOW) for device in TABLES)
    )
    assert those(lean, FOLLOW) == FOLLOWERS
    assert those(lean, FP32_RESULT) == RESULTS
    assert those(lean, PROMOTE) == PROMOTED
    assert not those(lean, BANNED)
    assert those(lean, FP32_IN_FP16) == {"pow.Tensor_Scalar"}
    given_up = FOLLOWERS | RESULTS | PROMOTED | AS_CALLED | {"pow.Tensor_Scalar"}
    fp32 = those(cpu, FP32) | those(cuda, FP32) | those(cuda, BANNED)
    fp32 |= {"linalg_matrix_norm", "linalg_matrix_norm.str_ord"}
    assert those(lean, FP32) == fp32 - given_up


def test_lean_has_no_row_for_statistics() -> None:
    """Law: batch and instance norm run as called: their weights stay fp32 themselves.

    Twin: torch has a row on MPS.
    """
    assert TABLES["mps"]["batch_norm"].category == FP32
    for device in LEAN:
        assert not {"batch_norm", "instance_norm"} & LEAN[device].keys()


def test_lean_names_real_operations() -> None:
    """Law: each row of lean is an operation of torch, overload included."""
    known = {*torch._C._dispatch_get_all_op_names()}
    assert {f"aten::{name}" for name in LEAN["cpu"]} <= known


# Modules


def test_modules_name_real_operations() -> None:
    """Law: each type is torch's, and its operation is aten's, overload included."""
    for name, operation in op_tables.OPERATION_OF.items():
        assert issubclass(getattr(nn, name), nn.Module)
        packet, _, overload = operation.partition(".")
        assert (overload or "default") in getattr(torch.ops.aten, packet).overloads()
